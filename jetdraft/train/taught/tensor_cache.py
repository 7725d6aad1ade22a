"""Tensors of texts on a disk, in shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetdraft.errors import DataError, OutputError
from jetdraft.files import check_place, is_free, write_text

SHARD = 64
"""Tensors in each file."""

OWNER = "owner.txt"
"""The file that says what the tensors were computed with."""


def check_cache(folder: Path) -> None:
    """Raise `OutputError` if a path is neither free nor a cache.

    check_cache(Path("labels"))
    """
    try:
        is_cache = (folder / OWNER).is_file() or is_free(folder)
    except OSError:
        is_cache = False
    if not is_cache:
        raise OutputError(
            f"{folder} is neither an empty folder nor the cache of a training; choose "
            "another folder"
        )
    check_place(folder / OWNER)


class TensorCache:
    """Tensors by key in the shards of a folder, which belongs to one target.

    `owner` says what the tensors were computed with. Raises `OutputError` for a folder
    of another owner, and if it cannot be written.

        cache = TensorCache(Path("states"), owner, process=0)
    """

    def __init__(self, folder: Path, owner: str, process: int = 0) -> None:
        self.folder = folder
        self.process = process
        self._pending: dict[str, Tensor] = {}
        self._places: dict[str, Path] = {}
        note = folder / OWNER
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if note.exists() and note.read_text(encoding="utf-8") != owner:
                raise OutputError(
                    f"{folder} holds what another target said, or for other taps, "
                    "another draft vocabulary or other --cache-tokens; choose another "
                    "folder"
                )
            # Whole at once, since other processes of the training read it now.
            write_text(note, owner)
        except OSError as error:
            raise OutputError(
                f"cannot write {folder} ({error.strerror}); choose another folder"
            ) from error
        for file in sorted(folder.glob("states-*.safetensors")):
            with _reading(file), safe_open(file, "pt") as opened:
                self._places |= dict.fromkeys(opened.keys(), file)

    def has(self, key: str) -> bool:
        """Whether a tensor is kept."""
        return key in self._pending or key in self._places

    def read(self, key: str) -> Tensor | None:
        """The tensor as it was written, or None."""
        if key in self._pending:
            return self._pending[key]
        if key not in self._places:
            return None
        file = self._places[key]
        with _reading(file), safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor

    def write(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor; a shard is written when it is full."""
        if self.has(key):
            return
        self._pending[key] = tensor.cpu().contiguous()
        if len(self._pending) >= SHARD:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that are not in a file yet."""
        if not self._pending:
            return
        # Two trainings may share the folder, and each has a process 0.
        mine = f"states-{self.process}-{os.getpid()}-"
        numbers = (int(f.stem[len(mine) :]) for f in self.folder.glob(f"{mine}*"))
        # Beyond the last, since a shard before it may have been deleted.
        name = f"{mine}{max(numbers, default=-1) + 1:08}.safetensors"
        file, partial = self.folder / name, self.folder / f".{name}.partial"
        try:
            save_file(self._pending, partial)
            partial.rename(file)
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"cannot write {file} ({error}); free some space or choose another "
                "folder"
            ) from error
        self._places |= dict.fromkeys(self._pending, file)
        self._pending = {}


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise `DataError` if the block cannot read a shard."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DataError(f"{file} is damaged ({error}); delete it") from error
