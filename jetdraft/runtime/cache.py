"""The KV buffers of one graph, and the cursor that says how much of them counts."""

from __future__ import annotations

import numpy as np

from jetdraft.contract import StepContract
from jetdraft.runtime.ort import ort


class Cache:
    """Fixed buffers, allocated once, and a cursor.

    Rows beyond `length` are stale and get overwritten, so forgetting is free.

        cache = Cache(contract)
        cache.advance(5)
        cache.rewind(3)   # length 3
    """

    def __init__(self, contract: StepContract) -> None:
        self.capacity = contract.capacity
        self.length = 0
        self.buffers = {
            spec.name: ort.OrtValue.ortvalue_from_numpy(
                np.zeros(spec.sized(), dtype=spec.dtype)
            )
            for spec in contract.buffers("past")
        }

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
