"""The integers of a GGUF file's matrices, as blocks that MatMulNBits multiplies.

Each type stores a row in blocks, with fields of bits side by side (ggml's
ggml-common.h has the layouts; d and m are a block's scale and minimum, in half):

Q4_0  d, 16 bytes of two integers          w = d (q - 8)
Q4_1  d, m, 16 bytes                       w = d q + m
Q5_0  d, 32 fifth bits, 16 bytes           w = d (q - 16)
Q5_1  d, m, 32 fifth bits, 16 bytes        w = d q + m
Q8_0  d, 32 int8                           w = d q
Q4_K  d, m, 8 scales and minima of 6 bits, 128 bytes     w = d s q - m t
Q5_K  the same, and 256 fifth bits before the bytes
Q6_K  128 bytes, 64 bytes of upper bits, 16 int8 scales, d    w = d s (q - 32)

Types without a minimum are exact in 4 or 8 bits. The zeros of MatMulNBits are integers
(the CPU kernel is a hundred times slower with float zeros), so a minimum needs a finer
grid: with w = d q + m, 8 bits hold the integers k q, the scale d / k and the zero
-k m / d, rounded. Each block has the k whose zero loses least, up to 17 for 4 bits and
to 8 for 5 bits; some k at most K loses less than d / (k (K + 1)) (Dirichlet).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jetdraft.quant.blocks import Blocks, Bytes, Floats

_LARGEST = 255
_FOUR_BITS, _FIVE_BITS = 17, 8
"""The largest k: the largest integers are then 15 * 17 and 31 * 8."""


@dataclass(frozen=True)
class GgufType:
    """How to read a type; `form` says in what form its matrices are kept.

    `read` takes the bytes uint8 [outputs, bytes] and gives their `Blocks`.

        TYPES["Q6_K"].read(tensor.data).bits  # 8
    """

    read: Callable[[Bytes], Blocks]
    form: str


def _q4_0(data: Bytes) -> Blocks:
    block = _split(data, 18)
    return _symmetric(_nibbles(block[..., 2:]), _half(block, 0), bits=4)


def _q5_0(data: Bytes) -> Blocks:
    block = _split(data, 22)
    integers = _nibbles(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return _symmetric(integers + np.uint8(128 - 16), _half(block, 0))


def _q8_0(data: Bytes) -> Blocks:
    block = _split(data, 34)
    return _symmetric(block[..., 2:] + np.uint8(128), _half(block, 0))


def _q4_1(data: Bytes) -> Blocks:
    block = _split(data, 20)
    integers = _nibbles(block[..., 4:])
    return _with_minimum(integers, _half(block, 0), _half(block, 2), _FOUR_BITS)


def _q5_1(data: Bytes) -> Blocks:
    block = _split(data, 24)
    integers = _nibbles(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return _with_minimum(integers, _half(block, 0), _half(block, 2), _FIVE_BITS)


def _q4_k(data: Bytes) -> Blocks:
    block = _split(data, 144)
    integers = _pairs_of_32(block[..., 16:])
    return _with_minimum(integers, *_scales_and_minima(block), _FOUR_BITS)


def _q5_k(data: Bytes) -> Blocks:
    block = _split(data, 176)
    # Bit s of byte i belongs to integer i of the part s of 32.
    upper = _shifted(block[..., None, 16:48], range(8)) & np.uint8(1)
    integers = _pairs_of_32(block[..., 48:]) | _joined(upper << np.uint8(4))
    return _with_minimum(integers, *_scales_and_minima(block), _FIVE_BITS)


def _q6_k(data: Bytes) -> Blocks:
    block = _split(data, 210)
    outer = block.shape[:2]
    # Two halves of 128 integers, each in quarters of 32.
    low = _nibbles(block[..., :128].reshape(*outer, 2, 64))
    high = block[..., 128:192].reshape(*outer, 2, 1, 32)
    high = _shifted(high, range(0, 8, 2)) & np.uint8(3)
    integers = low.reshape(*outer, 2, 4, 32) | (high << np.uint8(4))
    scales = _half(block, 208)[..., None] * block[..., 192:208].view(np.int8)
    integers = integers.reshape(len(block), -1, 16) + np.uint8(128 - 32)
    return _symmetric(integers, scales.reshape(len(block), -1))


TYPES = {
    "Q4_0": GgufType(_q4_0, "Q4_0 exact"),
    "Q4_1": GgufType(_q4_1, "Q4_1 as int8"),
    "Q5_0": GgufType(_q5_0, "Q5_0 exact"),
    "Q5_1": GgufType(_q5_1, "Q5_1 as int8"),
    "Q8_0": GgufType(_q8_0, "Q8_0 exact"),
    "Q4_K": GgufType(_q4_k, "Q4_K as int8"),
    "Q5_K": GgufType(_q5_k, "Q5_K as int8"),
    "Q6_K": GgufType(_q6_k, "Q6_K exact"),
}
"""The types whose integers are kept, by their names."""


def _split(data: Bytes, size: int) -> Bytes:
    """[outputs, blocks, size]."""
    return data.reshape(len(data), -1, size)


def _half(block: Bytes, start: int) -> Floats:
    """The half in two bytes of each block, as float32."""
    return block[..., start : start + 2].copy().view("<f2")[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """The lower halves of all bytes, then the upper halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _pairs_of_32(packed: Bytes) -> Bytes:
    """32 bytes hold 32 integers in their lower halves, the next in the upper."""
    parts = packed.reshape(*packed.shape[:2], 4, 1, 32)
    return _joined(_shifted(parts, (0, 4)) & np.uint8(15))


def _shifted(packed: Bytes, shifts: Iterable[int]) -> Bytes:
    """[..., shifts, bytes] of [..., 1, bytes], shifted down by each number."""
    return np.concatenate([packed >> np.uint8(shift) for shift in shifts], axis=-2)


def _joined(parts: Bytes) -> Bytes:
    """Blocks of 32 of blocks of 256."""
    return parts.reshape(len(parts), -1, 32)


def _scales_and_minima(block: Bytes) -> tuple[Floats, Floats]:
    """Both [outputs, blocks of 32]; the minima are negative.

    12 bytes hold eight scales and eight minima: of the first four the lower six bits of
    a byte each, of the others half a byte each and the bits left over in the first.
    """
    first, second, rest = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = [first & 63, (rest & 15) | ((first >> 6) << 4)]
    minima = [second & 63, (rest >> 4) | ((second >> 6) << 4)]
    whole, least = _half(block, 0), _half(block, 2)
    return tuple(  # type: ignore[return-value]
        (factor[..., None] * np.concatenate(parts, -1)).reshape(len(block), -1)
        for factor, parts in ((whole, scales), (-least, minima))
    )


def _symmetric(integers: Bytes, scales: Floats, bits: int = 8) -> Blocks:
    _, blocks, size = integers.shape
    return Blocks.of(integers, scales, None, bits, blocks * size)


def _with_minimum(
    integers: Bytes, steps: Floats, minima: Floats, finest: int
) -> Blocks:
    """Blocks of 8 bits for `steps * integers + minima`.

    Where no zero fits into a byte, all weights of a block have one sign, and the block
    is rounded again, to 255 steps of its largest weight.
    """
    finer, zeros = _finer(steps, minima, finest)
    again = finer == 0
    values = steps[again, None] * integers[again] + minima[again, None]
    largest = np.take_along_axis(values, np.abs(values).argmax(-1)[:, None], -1)
    scales = steps / np.maximum(finer, 1)
    scales[again] = largest[:, 0] / _LARGEST
    wide = integers * finer[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        rounded = np.nan_to_num(np.round(values / scales[again, None]))
    wide[again] = rounded.clip(0, _LARGEST).astype(np.uint8)
    _, blocks, size = wide.shape
    return Blocks.of(wide, scales, zeros, 8, blocks * size)


def _finer(steps: Floats, minima: Floats, finest: int) -> tuple[Bytes, Bytes]:
    """The k and the zero of each block; both are 0 where no zero fits into a byte."""
    finer, zeros = np.zeros((2, *steps.shape), np.uint8)
    least = np.full(steps.shape, np.inf, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = -minima / steps
    ratios[~np.isfinite(ratios)] = -1  # fits with no k
    for k in range(1, finest + 1):
        exact = k * ratios
        zero = np.round(exact)
        loss = np.abs(zero - exact) / k
        better = (loss < least) & (zero >= 0) & (zero <= _LARGEST)
        least[better], finer[better] = loss[better], k
        zeros[better] = zero[better].astype(np.uint8)
    return finer, zeros
