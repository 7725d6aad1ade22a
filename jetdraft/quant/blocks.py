"""A matrix as small integers with a scale per block: what every algorithm gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """`(integers - zeros) * scales`, of a matrix with `rows` rows.

    `packed` uint8 [columns, blocks, bytes] holds the integers, the first in the lowest
    bits; `scales` float and `zeros` uint8 [columns, blocks]; without zeros half the
    range is 0. What fills up the last block is never read. With `divisors` float [rows]
    the matrix is for inputs that are divided by them first; with an `order` int64
    [rows] its row i is for input `order[i]`.

        Blocks.of(integers, scales, None, bits=4, rows=384).packed
    """

    packed: Bytes
    scales: Floats
    zeros: Bytes | None
    bits: int
    rows: int
    divisors: Floats | None = None
    order: Order | None = None

    @classmethod
    def of(
        cls, integers: Bytes, scales: Floats, zeros: Bytes | None, bits: int, rows: int
    ) -> Blocks:
        """Of integers below 2^bits, uint8 [columns, blocks, block_size]."""
        return cls(_pack(integers, bits), scales, zeros, bits, rows)

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """One matrix of the columns of several of the same form."""
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return cls(
            np.concatenate([part.packed for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate(zeros) if zeros else None,
            parts[0].bits,
            parts[0].rows,
            order=parts[0].order,
        )

    @property
    def form(self) -> object:
        """What one product can only have one of."""
        order = None if self.order is None else self.order.tobytes()
        return self.bits, self.block_size, self.zeros is None, order

    @property
    def integers(self) -> Bytes:
        """uint8 [columns, blocks, block_size]."""
        return unpack(self.packed, self.bits)

    @property
    def block_size(self) -> int:
        """How many share a scale."""
        return int(self.packed.shape[2]) * 8 // self.bits

    @property
    def packed_zeros(self) -> Bytes | None:
        """uint8 [columns, bytes], packed along the blocks; None without zeros."""
        if self.zeros is None:
            return None
        spare = -self.zeros.shape[1] % (8 // self.bits)
        return _pack(np.pad(self.zeros, ((0, 0), (0, spare))), self.bits)

    @property
    def floats(self) -> Floats:
        """The matrix that they stand for, [rows, columns], for inputs as they come."""
        middle = 1 << (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros[..., None].astype(np.int16)
        whole = (self.integers.astype(np.int16) - zeros) * self.scales[..., None]
        floats: Floats = whole.reshape(len(whole), -1)[:, : self.rows].T
        if self.divisors is not None:
            floats = floats / self.divisors[:, None]
        if self.order is not None:
            floats = floats[np.argsort(self.order)]
        return floats.astype(self.scales.dtype)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """Integers of so many bits along the last axis, the lowest bits first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _pack(integers: Bytes, bits: int) -> Bytes:
    if bits == 8:
        return integers
    each = 8 // bits
    parts = integers.reshape(*integers.shape[:-1], -1, each)
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(each):
        packed |= parts[..., place] << np.uint8(bits * place)
    return packed
