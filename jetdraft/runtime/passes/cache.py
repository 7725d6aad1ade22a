"""The KV buffers of one graph, and the cursor that counts their committed rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.step_contract import StepContract
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import without_gaps
from jetdraft.runtime.passes.tensor import HOST, Memory


class Cache:
    """Fixed buffers, allocated once, and a cursor.

    Rows beyond `length` are stale and get overwritten, so a rewind is free. With a
    `compaction` session the rows of an accepted branch can be moved together; `seconds`
    is the total time spent in it.

        cache = Cache(contract)
        cache.advance(5)
        cache.rewind(3)   # length 3
    """

    def __init__(
        self,
        contract: StepContract,
        compaction: ort.InferenceSession | None = None,
        memory: Memory = HOST,
    ) -> None:
        self.capacity = contract.capacity
        self.length = 0
        self.seconds = 0.0
        self.memory = memory
        tensors = {
            spec.name: memory.tensor(spec.sized(), spec.dtype)
            for spec in contract.buffers("past")
        }
        self.buffers = {name: tensor.value for name, tensor in tensors.items()}
        self._compaction = compaction
        self._moves: dict[int, _Move] = {}

    @property
    def room(self) -> int:
        """How many rows still fit."""
        return self.capacity - self.length

    def advance(self, rows: int) -> None:
        """Commit the next `rows` rows."""
        if not 0 <= rows <= self.room:
            raise ValueError(f"cannot commit {rows} rows, {self.room} fit")
        self.length += rows

    def rewind(self, length: int) -> None:
        """Go back to `length` committed rows; nothing is copied."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} rows to {length}")
        self.length = length

    def stored(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the first `rows` rows by buffer, [1, kv_heads, rows, head_dim]."""
        with self.memory.alone():
            return {
                name: np.ascontiguousarray(buffer.numpy()[:, :, :rows])
                for name, buffer in self.buffers.items()
            }

    def restore(self, stored: Mapping[str, npt.NDArray[Any]], rows: int) -> None:
        """Put back the rows that `stored` has given, and commit them."""
        with self.memory.alone():
            for name, buffer in self.buffers.items():
                whole = np.array(buffer.numpy())
                whole[:, :, :rows] = stored[name]
                buffer.update_inplace(whole)
        self.length = rows

    def compact(self, path: Sequence[int]) -> None:
        """Commit only the rows `path` of the last pass, ascending from 0.

        Rows after the first gap are moved, on the device and in place. Raises
        `ValueError` if that needs a compaction graph and there is none.
        """
        kept = without_gaps(path)
        if kept < len(path):
            self._move([self.length + row for row in path[kept:]], self.length + kept)
        self.advance(len(path))

    def _move(self, source: list[int], target: int) -> None:
        """Move the rows `source` to `target` and the rows after it."""
        if self._compaction is None:
            raise ValueError("this cache has no compaction graph; give it one")
        move = self._moves.get(len(source))
        if move is None:
            move = _Move(self._compaction, self, len(source))
            self._moves[len(source)] = move
        with self.memory.alone():
            start = time.perf_counter()
            move.set(source, target)
            self._compaction.run_with_iobinding(move.io)
            self.seconds += time.perf_counter() - start


class _Move:
    """The binding of the compaction session for moves of `rows` rows."""

    def __init__(self, session: ort.InferenceSession, cache: Cache, rows: int) -> None:
        self.source = cache.memory.tensor((rows,), "int64")
        places = 1 if session.get_inputs()[1].shape == [1] else rows
        self.target = cache.memory.tensor((places,), "int64")
        self.io = session.io_binding()
        self.io.bind_ortvalue_input("source", self.source.value)
        self.io.bind_ortvalue_input("target", self.target.value)
        for name, buffer in cache.buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)

    def set(self, source: list[int], target: int) -> None:
        """Set the rows to move, and their places; some graphs read the first place."""
        self.source.array[:] = source
        self.target.array[:] = range(target, target + len(self.target.array))
        self.source.upload()
        self.target.upload()
