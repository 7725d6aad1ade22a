"""Rounding to llama.cpp's types: no coarser than its own, and to its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize
from gguf import quantize as quantize_as_gguf

from jetdraft.quant.algorithms import quantize
from jetdraft.quant.grids import GRIDS
from jetdraft.quant.rounding import round_to_grid
from jetdraft.recipe import Recipe

MATRIX = np.random.default_rng(0).standard_t(6, (512, 48)).astype(np.float32)

LARGEST_ERROR = {"Q4_K": 0.084, "Q5_K": 0.043, "Q6_K": 0.0215}
"""Of the types that the package gguf cannot round to, relative."""


def error(data, grid, weights=None):
    found = dequantize(data, GGMLQuantizationType[grid])[:, : len(MATRIX)].T
    squares = (found - MATRIX) ** 2
    if weights is not None:
        squares = squares * weights[:, None]
    return float(np.sqrt(squares.mean() / (MATRIX**2).mean()))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_error_is_at_most_that_of_llama_cpp(grid):
    bound = LARGEST_ERROR.get(grid)
    if bound is None:
        kind = GGMLQuantizationType[grid]
        bound = error(quantize_as_gguf(MATRIX.T.copy(), kind), grid)
    assert error(round_to_grid(MATRIX, grid), grid) <= bound


@pytest.mark.parametrize("grid", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("spread", [1, 6])  # the latter as in SmolLM2
def test_moments_lower_the_error_where_they_are_large(grid, spread):
    drawn = np.random.default_rng(1).standard_normal(512)
    moments = np.exp(spread * drawn).astype(np.float32)
    with_moments = round_to_grid(MATRIX, grid, moments)
    plain = round_to_grid(MATRIX, grid)
    assert error(with_moments, grid, moments) < error(plain, grid, moments)
    # A recipe of GPTQ has the moments of all pairs of inputs, for its head too.
    found = quantize(MATRIX, Recipe(grid.lower()), np.diag(moments))
    np.testing.assert_array_equal(found.data, with_moments)


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_type_can_hold_is_held(grid):
    """Zeros, equal numbers, and rows that fill no block."""
    matrix = np.zeros((300, 3), np.float32)
    matrix[:, 1], matrix[:, 2] = 0.5, -0.25
    found = dequantize(round_to_grid(matrix, grid), GGMLQuantizationType[grid])
    np.testing.assert_allclose(found[:, :300].T, matrix, rtol=0.02)
