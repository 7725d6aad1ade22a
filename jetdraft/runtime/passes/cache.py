"""The KV buffers of one graph, and the cursor that says how much of them counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contract import StepContract
from jetdraft.ort import ort
from jetdraft.runtime.drafts.rows import without_gaps
from jetdraft.runtime.passes.tensor import HOST, Memory


class Cache:
    """Fixed buffers, allocated once, and a cursor.

    Rows beyond `length` are stale and get overwritten, so forgetting is free. With a
    `compaction` session, rows of an accepted branch can be moved together; `seconds`
    adds up the time in it.

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
        """Rows that still fit."""
        return self.capacity - self.length

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.tensor_size_in_bytes() for buffer in self.buffers.values())

    def advance(self, rows: int) -> None:
        """Count the next `rows` rows as committed."""
        if not 0 <= rows <= self.room:
            raise ValueError(f"cannot commit {rows} rows, {self.room} fit")
        self.length += rows

    def rewind(self, length: int) -> None:
        """Go back to `length` committed rows; nothing is copied."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} rows to {length}")
        self.length = length

    def stored(self, rows: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the first rows of all buffers, [1, kv_heads, rows, head_dim]."""
        return {
            name: np.ascontiguousarray(buffer.numpy()[:, :, :rows])
            for name, buffer in self.buffers.items()
        }

    def restore(self, stored: Mapping[str, npt.NDArray[Any]], rows: int) -> None:
        """Put copied rows back, as committed ones."""
        for name, buffer in self.buffers.items():
            whole = np.array(buffer.numpy())
            whole[:, :, :rows] = stored[name]
            buffer.update_inplace(whole)
        self.length = rows

    def compact(self, path: Sequence[int]) -> None:
        """Commit the rows `path` of the last pass, ascending from 0, and no others.

        Only those beyond the first gap move, on the device and in place.
        """
        kept = without_gaps(path)
        if kept < len(path):
            self._move([self.length + row for row in path[kept:]], self.length + kept)
        self.advance(len(path))

    def _move(self, source: list[int], target: int) -> None:
        if self._compaction is None:
            raise ValueError("this cache was made without a compaction graph")
        move = self._moves.get(len(source))
        if move is None:
            move = _Move(self._compaction, self, len(source))
            self._moves[len(source)] = move
        start = time.perf_counter()
        move.set(source, target)
        self._compaction.run_with_iobinding(move.io)
        self.seconds += time.perf_counter() - start


class _Move:
    """The binding of a move of so many rows."""

    def __init__(self, session: ort.InferenceSession, cache: Cache, rows: int) -> None:
        self.source = cache.memory.tensor((rows,), "int64")
        self.target = cache.memory.tensor((1,), "int64")
        self.io = session.io_binding()
        self.io.bind_ortvalue_input("source", self.source.value)
        self.io.bind_ortvalue_input("target", self.target.value)
        for name, buffer in cache.buffers.items():
            self.io.bind_ortvalue_input(name, buffer)
            self.io.bind_ortvalue_output(name.replace("past_", "present_"), buffer)

    def set(self, source: list[int], target: int) -> None:
        """The rows to move, and where the first of them goes."""
        self.source.array[:] = source
        self.target.array[0] = target
        self.source.upload()
        self.target.upload()
