"""The algorithms that turn a matrix into small integers, with the same arguments.

rtn      rounds to nearest; a block's largest value sets its scale (onnxruntime)
k_quant  finds scale and zero by weighted least squares, as llama.cpp (onnxruntime)
hqq      finds the zero by half-quadratic optimization (onnxruntime, after Badri and
         Shaji, mobiusml 2023), rounded to an integer for the int8 kernels
gptq     rounds input by input; the later inputs correct each error (2210.17323)
"""

import warnings
from collections.abc import Callable

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
from torch import Tensor

from jetdraft.quant.blocks import Blocks, Floats, into_blocks
from jetdraft.quant.grids import GridMatrix, Matrix
from jetdraft.quant.rounding import round_to_grid
from jetdraft.recipe import GRIDS, Recipe, grid_for

DAMPING = 0.01  # Share of the mean second moment that is added; the paper's.
# A matrix of fewer rows or columns stays floats; Gemma 3n's mix whole states.
FEWEST = 8
GPTQ_COLUMNS = 4096  # Columns that are quantized at once, in double precision.


def rtn(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Round float [rows, columns] to nearest; ignore `moments`."""
    config = DefaultWeightOnlyQuantConfig(
        block_size=block_size, is_symmetric=True, bits=bits
    )
    quantizer = DefaultWeightOnlyQuantizer(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the read-only array is not written to
        # In C order; torch transposes three times as fast as numpy.
        turned: Floats = torch.from_numpy(matrix).contiguous().numpy()
    packed, scales, _ = quantizer.qbits_block_quant(turned)
    columns, rows = matrix.shape[1], matrix.shape[0]
    scales = scales.reshape(columns, -1)
    return Blocks(packed.reshape(*scales.shape, -1), scales, None, bits, rows)


def k_quant(
    matrix: Floats, bits: int, block_size: int, moments: Floats | None
) -> Blocks:
    """Find scale and zero of each block by least squares; ignore `moments`."""
    blocks = into_blocks(matrix.T, block_size, np.float32)
    columns, count, _ = blocks.shape
    with np.errstate(invalid="ignore", divide="ignore"):
        results = quant_tensor_k_quant_cpu(blocks, bits, block_size)
    integers, scales, zeros = results
    return Blocks.of(
        integers.reshape(blocks.shape).astype(np.uint8),
        scales.reshape(columns, count).astype(matrix.dtype),
        zeros.reshape(columns, count).astype(np.uint8),
        bits,
        len(matrix),
    )


def hqq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Find the zero of each block by a robust norm; ignore `moments`."""
    blocks = into_blocks(matrix.T, block_size, np.float32)
    columns, count, _ = blocks.shape
    quantizer = HQQWeightOnlyQuantizer(HQQWeightOnlyQuantConfig(block_size=block_size))
    _, scales, zeros = quantizer.quantize_internal(
        torch.from_numpy(blocks.reshape(columns, -1)), bits, group_size=block_size
    )
    largest = (1 << bits) - 1
    scale = scales.numpy().reshape(columns, count, 1)
    zero = zeros.numpy().reshape(columns, count, 1).round().clip(0, largest)
    integers = (blocks / scale + zero).round().clip(0, largest)
    return Blocks.of(
        integers.astype(np.uint8),
        scale[..., 0].astype(matrix.dtype),
        zero[..., 0].astype(np.uint8),
        bits,
        len(matrix),
    )


def gptq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Round input by input, and correct the inputs that follow; without zeros.

    `moments` [rows, rows] are the sums of x x^T over the inputs x. The GPTQ of
    onnxruntime 1.31 reads the zero side of the inverse's triangle: it only rounds.
    """
    assert moments is not None
    filled = -(-len(matrix) // block_size) * block_size
    inverse = _inverse_factor(moments, filled)
    starts = range(0, matrix.shape[1], GPTQ_COLUMNS)
    # The columns do not depend on each other.
    slices = [matrix[:, start : start + GPTQ_COLUMNS] for start in starts]
    return Blocks.concatenated(
        [_quantize_columns(columns, bits, block_size, inverse) for columns in slices]
    )


def _quantize_columns(
    matrix: Floats, bits: int, block_size: int, inverse: Tensor
) -> Blocks:
    rows, middle = len(matrix), 1 << (bits - 1)
    weights = torch.from_numpy(into_blocks(matrix.T, block_size, np.float64))
    columns, count, _ = weights.shape
    weights = weights.reshape(columns, -1)
    integers = torch.zeros(weights.shape, dtype=torch.uint8)
    scales = torch.zeros(columns, count, dtype=torch.double)
    for block in range(count):
        own = slice(block * block_size, (block + 1) * block_size)
        part, errors = weights[:, own], torch.zeros_like(weights[:, own])
        largest = part.gather(1, part.abs().argmax(1, keepdim=True))[:, 0]
        # Rounded to the stored type first, so that the errors include this rounding.
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


def _inverse_factor(moments: Floats, size: int) -> Tensor:
    """The upper Cholesky factor of the damped moments' inverse, [size, size]."""
    whole = torch.zeros(size, size, dtype=torch.double)
    rows = len(moments)
    whole[:rows, :rows] = torch.from_numpy(moments)
    diagonal = whole.diagonal()
    # Inputs that are always 0, and the filling of the last block, correct no errors.
    diagonal += DAMPING * diagonal[:rows].mean() + (diagonal == 0).double()
    lower = torch.linalg.cholesky(whole)
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper


# Quantizes a matrix [rows, columns] by bits, block size and moments [rows, rows].
Algorithm = Callable[[Floats, int, int, Floats | None], Blocks]
ALGORITHMS: dict[str, Algorithm] = {
    algorithm.__name__: algorithm for algorithm in (rtn, k_quant, hqq, gptq)
}


def quantize(matrix: Floats, recipe: Recipe, moments: Floats | None) -> Matrix:
    """Quantize a float matrix [rows, columns] by a recipe that has bits.

    `moments` are float [rows, rows]; a type of llama.cpp takes [rows], or None.
    """
    assert recipe.bits is not None
    if recipe.scheme in GRIDS:
        grid = grid_for(recipe.scheme, len(matrix)).upper()
        if moments is not None and moments.ndim == 2:  # a GPTQ recipe's
            moments = moments.diagonal()
        return GridMatrix(grid, round_to_grid(matrix, grid, moments), len(matrix))
    return ALGORITHMS[recipe.algorithm](matrix, recipe.bits, recipe.block_size, moments)
