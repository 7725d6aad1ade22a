"""A matrix as small integers with a scale per block: what every algorithm gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """`(integers - zeros) * scales`, of a matrix with `rows` rows.

    `integers` uint8 [columns, blocks, block_size] below 2^bits, `scales` float and
    `zeros` uint8 [columns, blocks]; without zeros half the range is 0. What fills up
    the last block is never read.

        Blocks(integers, scales, None, bits=4, rows=384).packed
    """

    integers: Bytes
    scales: Floats
    zeros: Bytes | None
    bits: int
    rows: int

    @property
    def packed(self) -> Bytes:
        """uint8 [columns, blocks, bytes], the first integer in the lowest bits."""
        return _pack(self.integers, self.bits)

    @property
    def packed_zeros(self) -> Bytes | None:
        """uint8 [columns, bytes], packed along the blocks; None without zeros."""
        if self.zeros is None:
            return None
        spare = -self.zeros.shape[1] % (8 // self.bits)
        return _pack(np.pad(self.zeros, ((0, 0), (0, spare))), self.bits)

    @property
    def floats(self) -> Floats:
        """The matrix that they stand for, [rows, columns]."""
        middle = 1 << (self.bits - 1)
        zeros = middle if self.zeros is None else self.zeros[..., None].astype(np.int16)
        whole = (self.integers.astype(np.int16) - zeros) * self.scales[..., None]
        floats: Floats = whole.reshape(len(whole), -1)[:, : self.rows].T
        return floats.astype(self.scales.dtype)


def unpack(packed: Bytes, bits: int) -> Bytes:
    """The inverse of packing, along the last axis."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def _pack(integers: Bytes, bits: int) -> Bytes:
    each = 8 // bits
    parts = integers.reshape(*integers.shape[:-1], -1, each)
    packed = np.zeros(parts.shape[:-1], np.uint8)
    for place in range(each):
        packed |= parts[..., place] << np.uint8(bits * place)
    return packed
