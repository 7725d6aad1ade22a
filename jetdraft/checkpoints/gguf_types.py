"""The integers of a GGUF file's matrices, as blocks that MatMulNBits multiplies.

A block has its integers q, a scale d and perhaps a minimum m: w = d q + m. In the types
Q*_K, a factor for each 16 or 32 weights multiplies d, and one multiplies m. The package
gguf computes w; where d and its factors are 1 and m is 0, that is q.

Types without a minimum are exact in 4 or 8 bits. The zeros of MatMulNBits are integers
(the CPU kernel is a hundred times slower with float zeros), so a minimum needs a finer
grid: with w = d q + m, 8 bits hold the integers k q, the scale d / k and the zero
-k m / d, rounded. Each block has the k whose zero loses least, up to 17 for 4 bits and
to 8 for 5 bits; some k at most K loses less than d / (k (K + 1)) (Dirichlet).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from jetdraft.quant.blocks import Blocks, Bytes, Floats

_LARGEST_BYTE = 255
_ONE, _ZERO = b"\0\x3c", b"\0\0"
"""1 and 0 as halves."""

_SCALED = MappingProxyType({0: _ONE})
_SHIFTED = MappingProxyType({0: _ONE, 2: _ZERO})
_SHIFTED_K = MappingProxyType({**_SHIFTED, 4: b"\1\1\1\1\0\0\0\0\1\1\1\1"})
"""Eight factors of 1 and eight of 0, in 6 bits each."""

_SCALED_K = MappingProxyType({192: bytes([1] * 16), 208: _ONE})


@dataclass(frozen=True)
class GgufType:
    """How to read uint8 [outputs, bytes] of a type; the manifest reports its `form`.

    `plain` has bytes, by offset in a block, that make scales 1 and minima 0; `finest`
    is the largest k of a type with minima, else 0.
    """

    form: str
    plain: Mapping[int, bytes]
    finest: int = 0
    bits: int = 8

    def read(self, data: Bytes) -> Blocks:
        """Read the blocks of a matrix, whose bytes are uint8 [outputs, bytes]."""
        kind = GGMLQuantizationType[self.form.split()[0]]
        block = data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])
        scales, minima = self._scales_and_minima(block)
        plain = block.copy()
        for place, values in self.plain.items():
            plain[..., place : place + len(values)] = np.frombuffer(values, np.uint8)
        integers = dequantize(plain.reshape(data.shape), kind)
        integers += 0 if self.finest else 1 << (self.bits - 1)
        blocks = integers.astype(np.uint8).reshape(*scales.shape, -1)
        if minima is not None:
            return _blocks_with_minimum(blocks, scales, minima, self.finest)
        return Blocks.of(blocks, scales, None, self.bits, integers.shape[1])

    def _scales_and_minima(self, block: Bytes) -> tuple[Floats, Floats | None]:
        """Return scales and minima [outputs, blocks]; minima are None without any."""
        if self.plain is _SCALED_K:
            scales = _half_at(block, 208)[..., None] * block[..., 192:208].view(np.int8)
            return scales.reshape(len(block), -1), None
        scales, minima = _half_at(block, 0), _half_at(block, 2)
        if self.plain is _SHIFTED_K:
            factors = Q4_K.get_scale_min(block[..., 4:16].reshape(-1, 12))
            scales, minima = (
                (half.reshape(-1, 1) * factor).reshape(len(block), -1)
                for half, factor in zip((scales, -minima), factors, strict=True)
            )
        return scales, minima if self.finest else None


GGUF_TYPES = {
    "Q4_0": GgufType("Q4_0 exact", _SCALED, bits=4),
    "Q4_1": GgufType("Q4_1 as int8", _SHIFTED, finest=17),
    "Q5_0": GgufType("Q5_0 exact", _SCALED),
    "Q5_1": GgufType("Q5_1 as int8", _SHIFTED, finest=8),
    "Q8_0": GgufType("Q8_0 exact", _SCALED),
    "Q4_K": GgufType("Q4_K as int8", _SHIFTED_K, finest=17),
    "Q5_K": GgufType("Q5_K as int8", _SHIFTED_K, finest=8),
    "Q6_K": GgufType("Q6_K exact", _SCALED_K),
}
"""The types whose integers are kept, by their names.

The largest integers are 15 * 17 and 31 * 8.
"""


def _half_at(block: Bytes, start: int) -> Floats:
    """Return the half at byte `start` of each block, as float32 [outputs, blocks]."""
    return block[..., start : start + 2].copy().view("<f2")[..., 0].astype(np.float32)


def _blocks_with_minimum(
    integers: Bytes, steps: Floats, minima: Floats, finest: int
) -> Blocks:
    """Make blocks of 8 bits that stand for `steps * integers + minima`."""
    finer, zeros = _choose_grid(steps, minima, finest)
    again = finer == 0
    values = steps[again, None] * integers[again] + minima[again, None]
    largest = np.take_along_axis(values, np.abs(values).argmax(-1)[:, None], -1)
    scales = steps / np.maximum(finer, 1)
    scales[again] = largest[:, 0] / _LARGEST_BYTE
    wide = integers * finer[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        rounded = np.nan_to_num(np.round(values / scales[again, None]))
    wide[again] = rounded.clip(0, _LARGEST_BYTE).astype(np.uint8)
    _, blocks, size = wide.shape
    return Blocks.of(wide, scales, zeros, 8, blocks * size)


def _choose_grid(steps: Floats, minima: Floats, finest: int) -> tuple[Bytes, Bytes]:
    """Choose k and zero of each block; both are 0 where no zero fits into a byte."""
    finer, zeros = np.zeros((2, *steps.shape), np.uint8)
    least = np.full(steps.shape, np.inf, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = -minima / steps
    ratios[~np.isfinite(ratios)] = -1  # fits with no k
    for k in range(1, finest + 1):
        exact = k * ratios
        zero = np.round(exact)
        loss = np.abs(zero - exact) / k
        better = (loss < least) & (zero >= 0) & (zero <= _LARGEST_BYTE)
        least[better], finer[better] = loss[better], k
        zeros[better] = zero[better].astype(np.uint8)
    return finer, zeros
