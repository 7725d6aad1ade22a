"""The output folder of a training: a checkpoint, and the state to resume from."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as serialized
from torch import Tensor

from jetdraft.checkpoints.folder import weights_sha256
from jetdraft.checkpoints.streams import SETTINGS, UNFINISHED, WEIGHTS
from jetdraft.errors import OutputError, as_error
from jetdraft.files import check_writable, replacing

STATE_FILE = "training.pt"  # The file with the state to resume from.
LINKED_BYTES = 1 << 20  # Larger files of the target are linked, not copied.


class RunFolder:
    """A folder that one training writes, and from which it resumes after a stop.

    With `add_target` it holds the target's files too. Each file appears whole or not at
    all. Raises `OutputError` if `path` exists and is no unfinished training.
    """

    def __init__(
        self,
        path: Path,
        weights: str = WEIGHTS,
        settings: str = SETTINGS,
        learned: str = "streams",
    ) -> None:
        self.path = path
        self.weights, self.settings, self.learned = weights, settings, learned
        if path.exists() and not (path / UNFINISHED).is_file():
            whole, lacks = "holds a finished training", f"exists and has no {learned}"
            fact = whole if self.has_weights else lacks
            raise OutputError(f"{path} {fact}; choose another folder")
        check_writable(path / weights)

    @property
    def has_weights(self) -> bool:
        return (self.path / self.settings).is_file()

    def add_target(self, source: Path, sha256: str) -> None:
        """Create the folder with the target's files, or check that it has them."""
        if self.path.exists():
            if weights_sha256(self.path) != sha256:
                raise OutputError(
                    f"{self.path} holds another target, or a damaged copy of this "
                    "one; choose another folder"
                )
            return
        with self._convert_errors():
            partial = self.path.with_name(f".{self.path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(source, partial, copy_function=_link_or_copy)
            (partial / UNFINISHED).write_text(self.learned, encoding="utf-8")
            partial.rename(self.path)

    def read_state(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read an earlier run's state, or None; `OutputError` if `run` differs."""
        file = self.path / STATE_FILE
        if not file.is_file():
            if self.has_weights:
                fact = f"{self.path} has {self.learned} but no state to resume from"
                raise OutputError(f"{fact}; choose another folder")
            return None
        fix = "train again into another folder"
        causes = OSError, RuntimeError, ValueError, EOFError, UnpicklingError
        with as_error(OutputError, causes, f"{file} is damaged", fix):
            state: dict[str, Any] = torch.load(file, "cpu", weights_only=True)
        old = state["run"]
        changed = [] if old["data"] == run["data"] else ["data"]
        for part in ("settings", "options"):
            names = old[part].keys() | run[part].keys()
            changed += sorted(n for n in names if old[part].get(n) != run[part].get(n))
        if changed:
            names = ", ".join(changed).replace("_", " ")
            fact = f"{self.path} holds a training with other settings ({names})"
            fix = "choose another folder, or give the same settings"
            raise OutputError(f"{fact}; {fix}")
        return state

    def save(
        self,
        weights: dict[str, Tensor],
        description: Mapping[str, Any],
        state: Mapping[str, Any],
        finished: bool,
    ) -> None:
        """Write state, weights and description; if `finished`, delete the state."""
        text = json.dumps(description, indent=2) + "\n"
        self._replace_file(STATE_FILE, lambda file: torch.save(state, file))
        contents = serialized(weights)
        self._replace_file(self.weights, lambda file: file.write_bytes(contents))
        self.write(self.settings, text)
        if finished:
            # A kill in between leaves a state too many, not a run without its state.
            (self.path / UNFINISHED).unlink(missing_ok=True)
            (self.path / STATE_FILE).unlink()

    def create(self) -> None:
        """Create the folder, marked as unfinished, unless it exists."""
        with self._convert_errors():
            if self.path.exists():
                return
            partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            partial.mkdir(parents=True, exist_ok=True)
            (partial / UNFINISHED).touch()
            try:
                partial.rename(self.path)
            except OSError:
                shutil.rmtree(partial)
                if not self.path.exists():
                    raise

    def write(self, name: str, text: str) -> None:
        """Write the text file `name`, whole or not at all; raises `OutputError`."""
        self._replace_file(name, lambda file: file.write_text(text, encoding="utf-8"))

    def _replace_file(self, name: str, write: Callable[[Path], Any]) -> None:
        with self._convert_errors(), replacing(self.path / name) as partial:
            write(partial)

    def _convert_errors(self) -> AbstractContextManager[None]:
        causes = OSError, RuntimeError, SafetensorError
        fact = f"cannot write {self.path}"
        fix = "free some space or choose another folder"
        return as_error(OutputError, causes, fact, fix)


def _link_or_copy(source: str, copy: str) -> str:
    """Hard-link a large file, to save space, or copy it; returns `copy`."""
    real = os.path.realpath(source)
    if os.path.getsize(real) >= LINKED_BYTES:
        try:
            os.link(real, copy)
            return copy
        except OSError:  # another file system, or one without links
            pass
    return shutil.copy2(real, copy)
