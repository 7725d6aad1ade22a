"""A matrix in a type of llama.cpp, w = d q + m, laid out as `native/format.h` says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from jetdraft.quant.blocks import Blocks, Bytes, Floats

# Of the layout that `GridMatrix.packed` returns; the library reads no other.
LAYOUT_VERSION = 1
# Columns that are unpacked together: their integers are floats for a moment.
COLUMNS_AT_ONCE = 4096
COLUMNS, _BLOCK = 16, 32  # Columns that lie together, and numbers of a block.
_ONE, _ZERO = b"\0\x3c", b"\0\0"  # 1 and 0 as halves.


@dataclass(frozen=True)
class _Grid:
    """Bits of an integer, the integer for 0, and bytes by offset that make w = q."""

    bits: int
    zero: int
    plain: Mapping[int, bytes]


_SCALE = MappingProxyType({0: _ONE})
_MINIMUM = MappingProxyType({0: _ONE, 2: _ZERO})
# Eight factors of 1 and eight of 0, in 6 bits each, behind scale and minimum.
_FACTORS = MappingProxyType({**_MINIMUM, 4: b"\1\1\1\1\0\0\0\0\1\1\1\1"})

_BYTE_FACTORS = MappingProxyType({192: bytes([1] * 16), 208: _ONE})
# Sixteen factors in 6 bits each, less 32, before the scale.
_SHORT_FACTORS = MappingProxyType({96: b"\x11" * 8 + b"\xaa" * 4, 108: _ONE})
# The bits of the planes that integers are split into, the low bits first.
_PLANES = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
# The first bits of quads in a byte of three bits' planes, which are read in pairs.
_PAIRED = {2: (0, 4, 2, 6), 1: (0, 4, 1, 5, 2, 6, 3, 7)}
# In the order of their numbers in graphs.
_GRIDS = {
    "Q4_0": _Grid(4, 8, _SCALE),
    "Q4_1": _Grid(4, 0, _MINIMUM),
    "Q5_0": _Grid(5, 16, _SCALE),
    "Q5_1": _Grid(5, 0, _MINIMUM),
    "Q8_0": _Grid(8, 0, _SCALE),
    "Q4_K": _Grid(4, 0, _FACTORS),
    "Q5_K": _Grid(5, 0, _FACTORS),
    "Q6_K": _Grid(6, 32, _BYTE_FACTORS),
    "Q3_K": _Grid(3, 4, _SHORT_FACTORS),
}
GRIDS = tuple(_GRIDS)


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
    block_size = 32

    @classmethod
    def concatenated(cls, parts: "Sequence[GridMatrix]") -> "GridMatrix":
        return replace(parts[0], data=np.concatenate([part.data for part in parts]))

    def select_columns(self, which: npt.NDArray[np.int64]) -> "GridMatrix":
        return replace(self, data=self.data[which])

    @property
    def form(self) -> object:
        return self.grid, self.rows

    @property
    def floats(self) -> Floats:
        """The matrix as float32 [rows, columns]."""
        floats: Floats = dequantize(self.data, GGMLQuantizationType[self.grid])
        return floats[:, : self.rows].T

    def integers(self) -> Bytes:
        """The integers uint8 [columns, rows], filled up to blocks; Q8_0's are int8."""
        grid, plain = _GRIDS[self.grid], self._bytes_of_blocks().copy()
        for place, values in grid.plain.items():
            plain[..., place : place + len(values)] = np.frombuffer(values, np.uint8)
        kind = GGMLQuantizationType[self.grid]
        signed = dequantize(plain.reshape(self.data.shape), kind) + grid.zero
        integers: Bytes = signed.astype(np.int16).astype(np.uint8)
        return integers

    def exact_blocks(self) -> Blocks | None:
        """The same numbers as `Blocks`; None for a type with minima."""
        grid = _GRIDS[self.grid]
        if grid.plain in (_MINIMUM, _FACTORS):
            return None
        bits = 4 if grid.bits <= 4 else 8
        scales, *factors = self._fields()
        floats = np.ascontiguousarray(scales).view("<f2")[..., 0].astype(np.float32)
        for factor in factors:
            floats = floats * factor.view(np.int8)[..., 0]
        floats = floats.reshape(len(self.data), -1)
        integers = self.integers() + np.uint8((1 << (bits - 1)) - grid.zero)
        blocks = integers.reshape(*floats.shape, -1)
        return Blocks.of(blocks, floats, None, bits, self.rows)

    def packed(self) -> tuple[Bytes, Bytes]:
        """Integers and scales as `jetdraft.native` reads them, both uint8 [bytes]."""
        whole = np.pad(self.data, ((0, -len(self.data) % COLUMNS), (0, 0)))
        starts, size = range(0, len(whole), COLUMNS_AT_ONCE), COLUMNS_AT_ONCE
        parts = [replace(self, data=whole[start : start + size]) for start in starts]
        bits = _GRIDS[self.grid].bits
        integers = [_pack_integers(part.integers(), bits) for part in parts]
        scales = [_pack_fields(part._fields()) for part in parts]
        return np.concatenate(integers), np.concatenate(scales)

    def _bytes_of_blocks(self) -> Bytes:
        """The bytes uint8 [columns, blocks, bytes]."""
        _, size = GGML_QUANT_SIZES[GGMLQuantizationType[self.grid]]
        return self.data.reshape(len(self.data), -1, size)

    def _fields(self) -> list[Bytes]:
        """Scales, minima and factors, uint8 [columns, blocks, numbers, bytes] each."""
        block, plain = self._bytes_of_blocks(), _GRIDS[self.grid].plain
        halves = [p for p, value in plain.items() if len(value) == len(_ONE)]
        fields = [block[..., None, place : place + 2] for place in halves]
        if plain is _FACTORS:
            both = Q4_K.get_scale_min(block[..., 4:16].reshape(-1, 12))
            shape = (*block.shape[:2], 8, 1)
            fields += [factors.astype(np.uint8).reshape(shape) for factors in both]
        if plain is _BYTE_FACTORS:
            fields.append(block[..., 192:208, None])
        if plain is _SHORT_FACTORS:
            pairs, fours = block[..., 96:104], block[..., 104:108]
            low = np.concatenate([pairs & np.uint8(15), pairs >> np.uint8(4)], -1)
            high = [fours >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)]
            factors = low | np.concatenate(high, -1) << np.uint8(4)
            fields.append((factors - np.uint8(32))[..., None])
        return fields


# A quantized matrix of either kind; both have `order`, `floats`, `form` and more.
Matrix = Blocks | GridMatrix


def _pack_integers(integers: Bytes, bits: int) -> Bytes:
    """Pack integers [columns, rows] by groups of columns, blocks and quads."""
    columns, rows = integers.shape
    split = integers.reshape(columns // COLUMNS, COLUMNS, rows // _BLOCK, 8, 4)
    quads: Bytes = split.transpose(0, 2, 3, 1, 4).reshape(-1, 8, 64)
    planes: list[Bytes] = []
    for width in _PLANES[bits]:
        own = (quads & np.uint8((1 << width) - 1)).reshape(-1, width, 8 // width, 64)
        places = _PAIRED[width] if bits == 3 else range(0, 8, width)
        shifts = np.array(places, np.uint8)[:, None]
        planes.append(np.bitwise_or.reduce(own << shifts, 2).reshape(len(quads), -1))
        quads = quads >> np.uint8(width % 8)
    return np.concatenate(planes, axis=1).ravel()


def _pack_fields(fields: list[Bytes]) -> Bytes:
    """Pack fields [columns, blocks, numbers, bytes], a number of 16 columns at once."""
    packed: list[Bytes] = []
    for field in fields:
        _, blocks, numbers, size = field.shape
        split = field.reshape(-1, COLUMNS, blocks, numbers, size)
        together = split.transpose(0, 2, 3, 1, 4)
        packed.append(together.reshape(-1, blocks, numbers * COLUMNS * size))
    return np.concatenate(packed, axis=-1).ravel()
