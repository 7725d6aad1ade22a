"""A matrix in one of llama.cpp's types, and its layout for `jetdraft.native`.

`native/format.h` describes the layout. Integers and scales are the type's own: nothing
is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from jetdraft import recipe
from jetdraft.quant.blocks import Bytes, Floats

LAYOUT_VERSION = 1
"""Of the layout that `GridMatrix.packed` returns; the library reads no other."""

GRIDS = tuple(grid.upper() for grid in recipe.GRIDS)
"""The types, in the order of their numbers in graphs."""

_COLUMNS, _BLOCK = 16, 32
"""Columns that lie together, and numbers of a block."""


@dataclass(frozen=True)
class GridMatrix:
    """A matrix of `rows` rows whose columns are in llama.cpp's type `grid`.

    `data` uint8 [columns, bytes] are the bytes of a GGUF file.

        GridMatrix("Q4_K", tensor.data, 2048).packed()
    """

    grid: str
    data: Bytes
    rows: int
    order = None

    @classmethod
    def concatenated(cls, parts: Sequence[GridMatrix]) -> GridMatrix:
        """Return one matrix with the columns of several, which have the same `form`."""
        return replace(parts[0], data=np.concatenate([part.data for part in parts]))

    def select_columns(self, which: npt.NDArray[np.int64]) -> GridMatrix:
        """Return the matrix of the columns with the numbers `which`, int64 [n]."""
        return replace(self, data=self.data[which])

    @property
    def form(self) -> object:
        """A value that is equal for matrices which can be concatenated."""
        return self.grid, self.rows

    @property
    def floats(self) -> Floats:
        """The matrix as float32 [rows, columns]."""
        floats: Floats = dequantize(self.data, GGMLQuantizationType[self.grid])
        return floats[:, : self.rows].T

    def packed(self) -> tuple[Bytes, Bytes]:
        """The integers and the scales, both uint8 [bytes], for the library."""
        _, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.grid]]
        spare = -len(self.data) % _COLUMNS
        data = np.pad(self.data, ((0, spare), (0, 0)))
        blocks = data.reshape(len(data), -1, size)
        integers, scales = _PARTS[self.grid](blocks)
        return _pack_integers(integers, _BITS[self.grid]), _pack_scales(scales)


_BITS = {grid: recipe.BITS[grid.lower()] for grid in GRIDS}

Parts = tuple[Bytes, list[Bytes]]
"""Integers uint8 [columns, rows]; then fields [columns, units, numbers, bytes]."""


def _halves(block: Bytes, count: int) -> Bytes:
    """The integers of four bits: `count` in the low halves of bytes, then the high."""
    low = block.reshape(*block.shape[:2], -1, 1, count)
    return np.concatenate([low & 15, low >> 4], axis=-2).reshape(*block.shape[:2], -1)


def _bit_planes(high: Bytes, shifts: Sequence[int], mask: int) -> Bytes:
    """Bits 4 and up of integers: those of `high` at each shift, one after another."""
    planes = [(high >> shift & mask) << 4 for shift in shifts]
    return np.stack(planes, axis=-2).reshape(*high.shape[:2], -1)


def _flat_parts(block: Bytes, *, with_minimum: bool, with_fifth: bool) -> Parts:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, perhaps minimum and fifth bits, integers."""
    start = 4 if with_minimum else 2
    fields = [block[..., place : place + 2, None] for place in range(0, start, 2)]
    integers = _halves(block[..., -16:], 16)
    if with_fifth:
        high = np.unpackbits(block[..., start : start + 4], axis=-1, bitorder="little")
        integers |= high << 4
    return integers.reshape(len(block), -1), [_swapped(field) for field in fields]


def _swapped(field: Bytes) -> Bytes:
    return np.swapaxes(field, -1, -2)


def _bytes_parts(block: Bytes) -> Parts:
    """Q8_0: scale, integers."""
    return block[..., 2:].reshape(len(block), -1), [block[..., None, :2]]


def _super_parts(block: Bytes, *, with_fifth: bool) -> Parts:
    """Q4_K and Q5_K: scale, minimum, their factors in 6 bits, fifth bits, integers."""
    columns, count, _ = block.shape
    integers = _halves(block[..., -128:], 32)
    if with_fifth:
        integers |= _bit_planes(block[..., 16:48], range(8), 1)
    factors = Q4_K.get_scale_min(block[..., 4:16].reshape(-1, 12))
    fields = [block[..., None, :2], block[..., None, 2:4]]
    fields += [f.astype(np.uint8).reshape(columns, count, 8, 1) for f in factors]
    return integers.reshape(columns, -1), fields


def _six_bit_parts(block: Bytes) -> Parts:
    """Q6_K: low bits, high bits, sixteen signed factors, scale."""
    columns, count, _ = block.shape
    low = block[..., :128].reshape(columns, count, 2, 64)
    high = block[..., 128:192].reshape(columns, count, 2, 32)
    integers = np.stack([low & 15, low >> 4], axis=3).reshape(columns, count, 2, 128)
    shifted = [(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)]
    integers |= np.concatenate(shifted, axis=-1)
    fields = [block[..., None, 208:], block[..., 192:208, None]]
    return integers.reshape(columns, -1), fields


_PARTS = {
    "Q4_0": lambda b: _flat_parts(b, with_minimum=False, with_fifth=False),
    "Q4_1": lambda b: _flat_parts(b, with_minimum=True, with_fifth=False),
    "Q5_0": lambda b: _flat_parts(b, with_minimum=False, with_fifth=True),
    "Q5_1": lambda b: _flat_parts(b, with_minimum=True, with_fifth=True),
    "Q8_0": _bytes_parts,
    "Q4_K": lambda b: _super_parts(b, with_fifth=False),
    "Q5_K": lambda b: _super_parts(b, with_fifth=True),
    "Q6_K": _six_bit_parts,
}
"""Splits the bytes [columns, blocks, bytes] of each type."""


def _pack_integers(integers: Bytes, bits: int) -> Bytes:
    """Pack integers [columns, rows] by groups of columns, blocks and quads."""
    columns, rows = integers.shape
    split = integers.reshape(columns // _COLUMNS, _COLUMNS, rows // _BLOCK, 8, 4)
    quads = split.transpose(0, 2, 3, 1, 4).reshape(-1, 8, 64)
    if bits == 8:
        return quads.ravel()
    planes = [(quads[:, ::2] & 15 | quads[:, 1::2] << 4).reshape(len(quads), -1)]
    high = quads >> 4
    if bits == 5:
        planes.append(np.packbits(high, axis=1, bitorder="little")[:, 0])
    if bits == 6:
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
        spread = high.reshape(-1, 2, 4, 64) << shifts
        planes.append(np.bitwise_or.reduce(spread, axis=2).reshape(len(quads), -1))
    return np.concatenate(planes, axis=1).ravel()


def _pack_scales(fields: list[Bytes]) -> Bytes:
    """Pack fields [columns, units, numbers, bytes], a number of all columns at once."""
    packed = []
    for field in fields:
        _, units, numbers, size = field.shape
        split = field.reshape(-1, _COLUMNS, units, numbers, size)
        together = split.transpose(0, 2, 3, 1, 4)
        packed.append(together.reshape(-1, units, numbers * _COLUMNS * size))
    return np.concatenate(packed, axis=-1).ravel()
