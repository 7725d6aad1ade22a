"""The algorithms that turn a matrix into small integers, with the same arguments.

rtn      rounds to nearest; a block's largest value sets its scale (onnxruntime)
k_quant  finds scale and zero by weighted least squares, as llama.cpp (onnxruntime)
hqq      finds the zero by half-quadratic optimization (onnxruntime, after Badri and
         Shaji, mobiusml 2023), rounded to an integer for the int8 kernels
gptq     rounds input by input; the later inputs correct each error (2210.17323)
"""

import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from onnxruntime.quantization import matmul_nbits_quantizer as nbits
from onnxruntime.quantization.neural_compressor import weight_only
from torch import Tensor

from jetdraft.quant.blocks import Blocks, Floats, into_blocks
from jetdraft.quant.grids import GridMatrix, Matrix
from jetdraft.quant.rounding import Steps, round_by, round_to_grid
from jetdraft.recipe import GRIDS, Recipe, grid_for

# A matrix of fewer rows or columns stays floats; Gemma 3n's mix whole states.
FEWEST = 8


def rtn(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Round float [rows, columns] to nearest; ignore `moments`."""
    how = {"block_size": block_size, "is_symmetric": True, "bits": bits}
    config = nbits.DefaultWeightOnlyQuantConfig(**how)
    quantizer = nbits.DefaultWeightOnlyQuantizer(config)
    with warnings.catch_warnings(action="ignore"):  # nothing writes to the array
        # In C order; torch transposes three times as fast as numpy.
        turned: Floats = torch.from_numpy(matrix).contiguous().numpy()
    packed, scales, _ = quantizer.qbits_block_quant(turned)
    columns, rows = matrix.shape[1], matrix.shape[0]
    scales = scales.reshape(columns, -1)
    return Blocks(packed.reshape(*scales.shape, -1), scales, None, bits, rows)


def k_quant(matrix: Floats, bits: int, size: int, moments: Floats | None) -> Blocks:
    """Find scale and zero of each block by least squares; ignore `moments`."""
    blocks = into_blocks(matrix.T, size, np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        results = weight_only.quant_tensor_k_quant_cpu(blocks, bits, size)
    integers = results[0].reshape(blocks.shape).astype(np.uint8)
    scales, zeros = (result.reshape(blocks.shape[:2]) for result in results[1:])
    parts = integers, scales.astype(matrix.dtype), zeros.astype(np.uint8)
    return Blocks.of(*parts, bits, len(matrix))


def hqq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Find the zero of each block by a robust norm; ignore `moments`."""
    blocks = into_blocks(matrix.T, block_size, np.float32)
    columns, count, _ = blocks.shape
    config = nbits.HQQWeightOnlyQuantConfig(block_size=block_size)
    quantize_blocks = nbits.HQQWeightOnlyQuantizer(config).quantize_internal
    rows = torch.from_numpy(blocks.reshape(columns, -1))
    _, scales, zeros = quantize_blocks(rows, bits, group_size=block_size)
    largest = (1 << bits) - 1
    scale = scales.numpy().reshape(columns, count, 1)
    zero = zeros.numpy().reshape(columns, count, 1).round().clip(0, largest)
    integers = (blocks / scale + zero).round().clip(0, largest).astype(np.uint8)
    parts = scale[..., 0].astype(matrix.dtype), zero[..., 0].astype(np.uint8)
    return Blocks.of(integers, *parts, bits, len(matrix))


def gptq(matrix: Floats, bits: int, block_size: int, moments: Floats | None) -> Blocks:
    """Round input by input, and correct the inputs that follow; without zeros.

    `moments` [rows, rows] are the sums of x x^T over the inputs x. The GPTQ of
    onnxruntime 1.31 reads the zero side of the inverse's triangle: it only rounds.
    """
    middle, width = 1 << (bits - 1), matrix.dtype.itemsize

    def fit(columns: Tensor, given: Tensor | None) -> Steps:
        largest = columns.gather(1, columns.abs().argmax(1, keepdim=True))
        # Rounded to the stored type first, so that errors include this rounding.
        stored = (largest / -middle).numpy().astype(matrix.dtype)
        scale = torch.from_numpy(stored).float()
        pack = partial(np.append, stored.view(np.uint8), axis=1)
        return Steps(scale, torch.zeros_like(scale), -middle, middle - 1, pack)

    done = round_by(fit, matrix, block_size, moments)
    done = done.reshape(len(done), -1, width + block_size)
    scales = np.ascontiguousarray(done[..., :width]).view(matrix.dtype)[..., 0]
    return Blocks.of(done[..., width:], scales, None, bits, len(matrix))


# Quantizes a matrix [rows, columns] by bits, block size and moments [rows, rows].
Algorithm = Callable[[Floats, int, int, Floats | None], Blocks]
_ALL: tuple[Algorithm, ...] = (rtn, k_quant, hqq, gptq)
ALGORITHMS = {algorithm.__name__: algorithm for algorithm in _ALL}


def quantize(matrix: Floats, recipe: Recipe, moments: Floats | None) -> Matrix:
    """Quantize a float matrix [rows, columns] by a recipe that has bits.

    `moments` are float [rows, rows]; a type of llama.cpp takes [rows], or None.
    """
    assert recipe.bits is not None
    if recipe.scheme in GRIDS:
        grid = grid_for(recipe.scheme, len(matrix)).upper()
        return GridMatrix(grid, round_to_grid(matrix, grid, moments), len(matrix))
    return ALGORITHMS[recipe.algorithm](matrix, recipe.bits, recipe.block_size, moments)
