"""How a matrix becomes small integers, each algorithm a function of the same form.

rtn      round to nearest, the block's largest value setting the scale (onnxruntime)
k_quant  scale and zero by weighted least squares, as llama.cpp's K-quants (onnxruntime)
hqq      the zero by half-quadratic optimization of a robust norm (onnxruntime, after
         Badri and Shaji, mobiusml 2023); zeros are rounded, as int8 kernels need them
gptq     column by column, each rounding error put right by the columns to come, by the
         second moments of the inputs (Frantar et al., 2210.17323)
awq      rounds to nearest after scaling up the inputs that are large, which are divided
         by the same scale as they come (Lin et al., 2306.00978)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
    HQQWeightOnlyQuantConfig,
    HQQWeightOnlyQuantizer,
)
from onnxruntime.quantization.neural_compressor.weight_only import (
    quant_tensor_k_quant_cpu,
)

from jetdraft.quant.blocks import Blocks, Floats
from jetdraft.recipe import Recipe

DAMPING = 0.01
"""Of the mean second moment, added to all: the paper's value."""

GPTQ_COLUMNS = 4096
"""Of a matrix that are worked on at once, in double precision."""

AWQ_POWERS = tuple(step / 20 for step in range(20))
AWQ_COLUMNS = 512
"""Of a matrix, to choose the power by."""


def rtn(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Symmetric; the value of largest magnitude becomes the most negative integer."""
    config = DefaultWeightOnlyQuantConfig(
        block_size=block_size, is_symmetric=True, bits=bits
    )
    quantizer = DefaultWeightOnlyQuantizer(config)
    packed, scales, _ = quantizer.qbits_block_quant(_by_rows(matrix))
    columns, rows = matrix.shape[1], matrix.shape[0]
    scales = scales.reshape(columns, -1)
    return Blocks(packed.reshape(*scales.shape, -1), scales, None, bits, rows)


def _by_rows(matrix: Floats) -> Floats:
    """The same in C order; torch turns a matrix three times as fast as numpy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it could be written to, and is not
        turned: Floats = torch.from_numpy(matrix).contiguous().numpy()
    return turned


def k_quant(
    matrix: Floats, bits: int, block_size: int, moments: Floats | None
) -> Blocks:
    """With a zero per block."""
    blocks = _blocks(matrix, block_size)
    columns, count, _ = blocks.shape
    with np.errstate(invalid="ignore", divide="ignore"):
        found = quant_tensor_k_quant_cpu(blocks, bits, block_size)
    integers, scales, zeros = found
    return Blocks.of(
        integers.reshape(blocks.shape).astype(np.uint8),
        scales.reshape(columns, count).astype(matrix.dtype),
        zeros.reshape(columns, count).astype(np.uint8),
        bits,
        len(matrix),
    )


def hqq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """With a zero per block."""
    blocks = _blocks(matrix, block_size)
    columns, count, _ = blocks.shape
    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=block_size))
    _, scales, zeros = quantizer.quantize_internal(
        torch.from_numpy(blocks.reshape(columns, -1)), bits, group_size=block_size
    )
    most = (1 << bits) - 1
    scale = scales.numpy().reshape(columns, count, 1)
    zero = zeros.numpy().reshape(columns, count, 1).round().clip(0, most)
    integers = (blocks / scale + zero).round().clip(0, most)
    return Blocks.of(
        integers.astype(np.uint8),
        scale[..., 0].astype(matrix.dtype),
        zero[..., 0].astype(np.uint8),
        bits,
        len(matrix),
    )


def gptq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Symmetric. `moments` [rows, rows] are the sums of x x^T over the inputs x.

    onnxruntime has a GPTQ too, but in 1.31 it reads the inverse's triangle from the
    side that is zero, and passes no error on: its result is that of rounding.
    """
    assert moments is not None
    filled = -(-len(matrix) // block_size) * block_size
    inverse = _inverse(moments, filled)
    starts = range(0, matrix.shape[1], GPTQ_COLUMNS)
    # Columns know nothing of each other.
    slices = [matrix[:, start : start + GPTQ_COLUMNS] for start in starts]
    return Blocks.joined([_gptq(each, bits, block_size, inverse) for each in slices])


def _gptq(matrix: Floats, bits: int, block_size: int, inverse: torch.Tensor) -> Blocks:
    """Some columns, with the factor of the inverse that `_inverse` gives."""
    rows, middle = len(matrix), 1 << (bits - 1)
    weights = torch.from_numpy(_blocks(matrix, block_size)).double()
    columns, count, _ = weights.shape
    weights = weights.reshape(columns, -1)
    integers = torch.zeros(weights.shape, dtype=torch.uint8)
    scales = torch.zeros(columns, count, dtype=torch.double)
    for block in range(count):
        own = slice(block * block_size, (block + 1) * block_size)
        part, errors = weights[:, own], torch.zeros_like(weights[:, own])
        largest = part.gather(1, part.abs().argmax(1, keepdim=True))[:, 0]
        # Stored in the matrix's type, and the errors are those of what is stored.
        scale = torch.from_numpy((largest / -middle).numpy().astype(matrix.dtype))
        scale = torch.where(scale == 0, 1.0, scale.double())
        scales[:, block] = scale
        triangle = inverse[own, own]
        for place in range(block_size):
            integer = (part[:, place] / scale).round().clamp(-middle, middle - 1)
            error = (part[:, place] - integer * scale) / triangle[place, place]
            part[:, place:] -= error[:, None] * triangle[place, place:]
            integers[:, own.start + place] = (integer + middle).to(torch.uint8)
            errors[:, place] = error
        weights[:, own.stop :] -= errors @ inverse[own, own.stop :]
    return Blocks.of(
        integers.numpy().reshape(columns, count, block_size),
        scales.numpy().astype(matrix.dtype),
        None,
        bits,
        rows,
    )


def awq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Symmetric. `moments` as for `gptq`; the blocks have divisors.

    The scale is the root mean square of an input to the power a, the a of the least
    error of the outputs (equations 4 and 5, which take the mean magnitude).
    """
    assert moments is not None
    size = np.sqrt(np.diag(moments))
    size = np.where(size > 0, size, size[size > 0].min(initial=np.inf))
    if not np.isfinite(size).all():
        return rtn(matrix, bits, block_size, moments)
    some = matrix[:, :: -(-matrix.shape[1] // AWQ_COLUMNS)].astype(np.float32)
    inputs = moments.astype(np.float32)

    def scaled(power: float) -> Floats:
        scale = size**power
        found: Floats = scale / np.sqrt(scale.max() * scale.min())
        return found.astype(np.float32)

    def loss(power: float) -> float:
        scale = scaled(power)[:, None]
        error = rtn(some * scale, bits, block_size, None).floats / scale - some
        return float(np.vdot(error, inputs @ error))

    scale = scaled(min(AWQ_POWERS, key=loss))
    stored = (matrix * scale[:, None]).astype(matrix.dtype)
    return replace(rtn(stored, bits, block_size, None), divisors=scale)


def _inverse(moments: Floats, size: int) -> torch.Tensor:
    """The upper Cholesky factor of the damped moments' inverse, [size, size]."""
    whole = torch.zeros(size, size, dtype=torch.double)
    rows = len(moments)
    whole[:rows, :rows] = torch.from_numpy(moments)
    diagonal = whole.diagonal()
    # An input that was never seen has nothing to put right, nor has a filling.
    diagonal += DAMPING * diagonal[:rows].mean() + (diagonal == 0).double()
    lower = torch.linalg.cholesky(whole)
    upper: torch.Tensor = torch.linalg.cholesky(
        torch.cholesky_inverse(lower), upper=True
    )
    return upper


def _blocks(matrix: Floats, block_size: int) -> Floats:
    """float32 [columns, blocks, block_size] of [rows, columns], filled up with 0."""
    rows, columns = matrix.shape
    filled = np.zeros((columns, -(-rows // block_size) * block_size), np.float32)
    filled[:, :rows] = matrix.T
    return filled.reshape(columns, -1, block_size)


Algorithm = Callable[[Floats, int, int, Floats | None], Blocks]
ALGORITHMS: dict[str, Algorithm] = {
    each.__name__: each for each in (rtn, k_quant, hqq, gptq, awq)
}
"""By name; all take a matrix [rows, columns], bits, block size and moments."""


def quantize(
    matrix: Floats, recipe: Recipe, moments: Floats | None, tied: bool = False
) -> Blocks:
    """Integers of a matrix [rows, columns] by a recipe that has bits.

    A head that is `tied` gives the embeddings too, whose numbers nothing can divide.
    """
    assert recipe.bits is not None
    algorithm = recipe.algorithm
    if tied and algorithm == "awq":
        algorithm = "rtn"
    return ALGORITHMS[algorithm](matrix, recipe.bits, recipe.block_size, moments)
