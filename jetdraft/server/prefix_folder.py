"""Beginnings of prompts on disk, for whoever sends a prompt that begins alike."""

import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from uuid import uuid4

import numpy as np

from jetdraft.contracts.tensors import Int64s
from jetdraft.errors import JetdraftError, OutputError, StoreError
from jetdraft.files import read_arrays
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.prefix import TOKENS, common_length

MIN_ROWS = 64  # Fewer rows are read again sooner than a file.
REMEMBERED_PROMPTS = 64  # Their beginnings are compared with a new prompt's.
log = logging.getLogger("jetdraft.server")


class PrefixFolder:
    """Keeps rows of beginnings that prompts share, in files of at most `most_bytes`.

    A prompt that continues an earlier prompt, as a conversation does, shares nothing
    new: its rows are in the buffers. `name` stands for bundle and machine. The files
    that were unused for longest go first, whatever their names. Several threads may use
    a folder, each with a model of its own. Raises `OutputError` if it cannot be made.

        folder = PrefixFolder(Path("prefixes"), "fp_0123", 1_000_000_000)
        folder.load(model, prompt)    # before the generation
        folder.save(model, prompt)    # after it
    """

    def __init__(self, folder: Path, name: str, most_bytes: int) -> None:
        self._all, self._own, self._most_bytes = folder, folder / name, most_bytes
        self._prompts: deque[Int64s] = deque(maxlen=REMEMBERED_PROMPTS)
        self._lock = Lock()
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise OutputError(
                f"cannot make {self._own} ({error}); choose another --prefixes"
            ) from error
        self._saved = {file: _read_tokens(file) for file in self._own.glob("*.npz")}

    def load(self, model: Model, prompt: Sequence[int]) -> None:
        """Put rows that begin `prompt` into the model's buffers, if it lacks many."""
        rows, file = self._longest(model, prompt)
        held = model.parts.prefix.reusable_rows(prompt, exact=True)
        if file is None or rows < held + MIN_ROWS:
            return
        try:
            model.load_prefix(file)
            os.utime(file)  # so that it is deleted later
        except (JetdraftError, OSError) as error:
            self._drop(file, error)

    def save(self, model: Model, prompt: Sequence[int]) -> None:
        """Save the beginning that `prompt` shares with an earlier prompt, if new."""
        ids, shared = np.asarray(prompt, np.int64), 0
        saved, _ = self._longest(model, prompt)
        with self._lock:
            for earlier in self._prompts:
                common = common_length(earlier, ids)
                if common < min(len(earlier), len(ids)):
                    shared = max(shared, common)
            self._prompts.append(ids)
        forms = [each.forms(shared).values() for each in model.parts.caches.values()]
        size = sum(math.prod(s) * t.itemsize for own in forms for s, t in own)
        if shared < saved + MIN_ROWS or size > self._most_bytes:
            return
        file = self._own / f"{uuid4().hex}.npz"
        try:
            self._make_room(size)
            model.save_prefix(file, ids[:shared])
            with self._lock:
                self._saved[file] = ids[:shared]
        except (JetdraftError, OSError) as error:
            self._drop(file, error)

    def _longest(self, model: Model, prompt: Sequence[int]) -> tuple[int, Path | None]:
        """How many rows of a prompt a file has, and the file that has the most."""
        # Recurrent states are of all rows of a file.
        whole = bool(model.parts.target.cache.states)
        best: tuple[int, Path | None] = 0, None
        with self._lock:
            for file, tokens in self._saved.items():
                rows = common_length(tokens, prompt)
                if rows > best[0] and (rows == len(tokens) or not whole):
                    best = rows, file
        return best

    def _make_room(self, size: int) -> None:
        """Delete the files that were unused for longest, until `size` bytes fit."""
        stats = [(file, file.stat()) for file in self._all.glob("*/*.npz")]
        used = size + sum(stat.st_size for _, stat in stats)
        for file, stat in sorted(stats, key=lambda pair: pair[1].st_mtime):
            if used > self._most_bytes:
                used -= stat.st_size
                self._drop(file)

    def _drop(self, file: Path, error: Exception | None = None) -> None:
        """Delete a file, and log the `error` that is the reason, if there is any."""
        if error is not None:
            log.warning("%s", error)
        with self._lock:
            self._saved.pop(file, None)
        file.unlink(missing_ok=True)


def _read_tokens(file: Path) -> Int64s:
    """The tokens whose rows a file has; no tokens if it cannot be read."""
    try:
        refusal = StoreError(f"{file} is not a saved prefix; delete it")
        return np.asarray(read_arrays(file, refusal, TOKENS)[TOKENS], np.int64)
    except JetdraftError as error:
        log.warning("%s", error)
        return np.zeros(0, np.int64)
