"""A matrix as small integers with a scale per block: the result of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]
Order = npt.NDArray[np.int64]  # The input that each row of a matrix belongs to.


@dataclass(frozen=True)
class Blocks:
    """A quantized matrix of `rows` rows, `(integers - zeros) * scales`.

    A block is integers of a column with a shared scale. `packed` uint8 [columns,
    blocks, bytes] has the first in the lowest bits; `scales` float and `zeros` uint8
    are [columns, blocks]. Without `zeros` the middle of the range stands for 0. With
    an `order` int64 [rows], row i belongs to input `order[i]`.
    """

    packed: Bytes
    scales: Floats
    zeros: Bytes | None
    bits: int
    rows: int
    order: Order | None = None

    @classmethod
    def of(
        cls, integers: Bytes, scales: Floats, zeros: Bytes | None, bits: int, rows: int
    ) -> Blocks:
        """Make blocks of integers below 2^bits, uint8 [columns, blocks, block_size]."""
        return cls(_pack_integers(integers, bits), scales, zeros, bits, rows)

    @classmethod
    def concatenated(cls, parts: Sequence[Blocks]) -> Blocks:
        """Return one matrix with the columns of several, which have the same `form`."""
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return replace(
            parts[0],
            packed=np.concatenate([part.packed for part in parts]),
            scales=np.concatenate([part.scales for part in parts]),
            zeros=np.concatenate(zeros) if zeros else None,
        )

    def select_columns(self, which: npt.NDArray[np.int64]) -> Blocks:
        """Return the matrix of the columns with the numbers `which`, int64 [n]."""
        zeros = None if self.zeros is None else self.zeros[which]
        packed, scales = self.packed[which], self.scales[which]
        return replace(self, packed=packed, scales=scales, zeros=zeros)

    @property
    def form(self) -> object:
        """A value that is equal for matrices which can be concatenated by columns."""
        order = None if self.order is None else self.order.tobytes()
        return self.bits, self.block_size, self.zeros is None, order

    @property
    def integers(self) -> Bytes:
        """The unpacked integers, uint8 [columns, blocks, block_size]."""
        return unpack(self.packed, self.bits)

    @property
    def block_size(self) -> int:
        """The number of integers that share a scale."""
        return int(self.packed.shape[2]) * 8 // self.bits

    @property
    def packed_zeros(self) -> Bytes | None:
        """The zeros packed along the blocks, uint8 [columns, bytes], or None."""
        if self.zeros is None:
            return None
        spare = -self.zeros.shape[1] % (8 // self.bits)
        return _pack_integers(np.pad(self.zeros, ((0, 0), (0, spare))), self.bits)

    @property
    def floats(self) -> Floats:
        """The matrix as floats [rows, columns], its rows in the inputs' order."""
        # In place, since a head of 150,000 tokens takes a gigabyte.
        whole = self.integers.astype(self.scales.dtype)
        middle = 1 << (self.bits - 1)
        whole -= middle if self.zeros is None else self.zeros[..., None]
        whole *= self.scales[..., None]
        floats: Floats = whole.reshape(len(whole), -1)[:, : self.rows].T
        return floats if self.order is None else floats[np.argsort(self.order)]


def into_blocks(
    columns: npt.NDArray[Any], block_size: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Split [columns, rows] into [columns, blocks, block_size]; zeros fill the last."""
    count, rows = columns.shape
    blocks = -(-rows // block_size)
    filled = np.zeros((count, blocks * block_size), dtype)
    filled[:, :rows] = columns
    return filled.reshape(count, blocks, block_size)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """Unpack integers of `bits` bits along the last axis, the lowest bits first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _pack_integers(integers: Bytes, bits: int) -> Bytes:
    """Pack integers of `bits` bits along the last axis, the first in the low bits."""
    if bits == 8:
        return integers
    per_byte = 8 // bits
    parts = integers.reshape(*integers.shape[:-1], -1, per_byte)
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(per_byte):
        packed |= parts[..., place] << np.uint8(bits * place)
    return packed
