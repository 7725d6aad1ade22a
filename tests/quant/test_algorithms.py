"""Algorithms that quantize a matrix, and the rounding to llama.cpp's types."""

import numpy as np
import onnxruntime
import pytest
from gguf import GGMLQuantizationType, dequantize
from gguf import quantize as quantize_as_gguf
from onnx import TensorProto, helper, numpy_helper

from jetdraft.quant.algorithms import ALGORITHMS, quantize
from jetdraft.quant.grids import GRIDS
from jetdraft.quant.rounding import round_to_grid
from jetdraft.recipe import ALGORITHMS as NAMES
from jetdraft.recipe import SYMMETRIC, Recipe

ROWS, COLUMNS = 72, 24
"""Rows are a multiple of the smallest block size only."""

BITS = [2, 4, 8]


def matrix(seed=0, offset=0.0):
    random = np.random.default_rng(seed)
    return (random.standard_normal((ROWS, COLUMNS)) + offset).astype(np.float32)


def inputs(count=400, seed=1):
    """Correlated, like hidden states."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((8, ROWS)) * 3
    plain = random.standard_normal((count, ROWS)) * 0.3
    return (random.standard_normal((count, 8)) @ mixed + plain).astype(np.float32)


def moments(x):
    return x.astype(np.float64).T @ x


def quantized(name, bits, block=32, weights=None):
    weights = matrix() if weights is None else weights
    return ALGORITHMS[name](weights, bits, block, moments(inputs()))


def test_the_names_are_those_of_recipes():
    assert tuple(ALGORITHMS) == NAMES


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_computes_with_the_same_numbers(name, bits):
    blocks = quantized(name, bits)
    names = ["x", "b", "scales"]
    arrays = {"b": blocks.packed, "scales": blocks.scales}
    if blocks.packed_zeros is not None:
        names.append("zeros")
        arrays["zeros"] = blocks.packed_zeros
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft", K=ROWS, N=COLUMNS,
        bits=bits, block_size=32,
    )  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", TensorProto.FLOAT, [1, ROWS])],
        [value("y", TensorProto.FLOAT, [1, COLUMNS])],
        [numpy_helper.from_array(array, key) for key, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = inputs(1)
    [products] = session.run(None, {"x": x})
    np.testing.assert_allclose(products, x @ blocks.floats, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", NAMES)
def test_no_number_is_off_by_more_than_its_step(name, bits, block):
    if name == "gptq":
        pytest.skip("it moves numbers on purpose")
    blocks, weights = quantized(name, bits, block), matrix()
    steps = np.repeat(np.abs(blocks.scales), block, 1)[:, :ROWS].T
    # Half a step, but the largest value of the other sign may lie one step outside;
    # least squares cuts off more.
    limit = 1.01 if name == "rtn" else 2.0
    assert np.abs(blocks.floats - weights).max() <= (limit * steps).max() + 1e-6
    assert blocks.integers.shape == (COLUMNS, -(-ROWS // block), block)
    assert blocks.integers.max() < 1 << bits


@pytest.mark.parametrize("name", NAMES)
def test_only_asymmetric_algorithms_have_zeros(name):
    assert (quantized(name, 4).zeros is None) == (name in SYMMETRIC)


@pytest.mark.parametrize("name", ["k_quant", "hqq"])
def test_zeros_help_where_blocks_are_not_about_0(name):
    weights = matrix(offset=0.8)
    errors = [
        np.square(quantized(algorithm, 4, weights=weights).floats - weights).sum()
        for algorithm in (name, "rtn")
    ]
    assert errors[0] < 0.8 * errors[1]


def test_gptq_lowers_the_error_of_outputs():
    """The error of the outputs, which counts, falls; the error of the weights rises."""
    weights, x = matrix(), inputs()
    errors = {}
    for name in ("rtn", "gptq"):
        difference = quantized(name, 4).floats - weights
        errors[name] = np.square(x @ difference).sum(), np.square(difference).sum()
    assert errors["gptq"][0] < 0.5 * errors["rtn"][0]
    assert errors["gptq"][1] > errors["rtn"][1]


def test_gptq_of_uncorrelated_inputs_is_rounding():
    blocks = ALGORITHMS["gptq"](matrix(), 4, 16, np.eye(ROWS))
    same = blocks.floats == quantized("rtn", 4, 16).floats
    assert same.mean() > 0.99, "but for ties"


def test_gptq_takes_inputs_that_were_always_0():
    seen = moments(inputs())
    seen[5], seen[:, 5] = 0, 0
    blocks = ALGORITHMS["gptq"](matrix(), 4, 32, seen)
    assert np.isfinite(blocks.floats).all()
    assert np.abs(blocks.floats[5] - matrix()[5]).max() < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_of_zeros(name):
    blocks = quantized(name, 4, weights=np.zeros((ROWS, COLUMNS), np.float32))
    assert np.array_equal(blocks.floats, np.zeros((ROWS, COLUMNS)))


NUMBERS = np.random.default_rng(0).standard_t(6, (512, 48)).astype(np.float32)

LARGEST_ERROR = {"Q4_K": 0.084, "Q5_K": 0.043, "Q6_K": 0.0215}
"""Of the types that the package gguf cannot round to, relative."""


def error(data, grid, weights=None):
    found = dequantize(data, GGMLQuantizationType[grid])[:, : len(NUMBERS)].T
    squares = (found - NUMBERS) ** 2
    if weights is not None:
        squares = squares * weights[:, None]
    return float(np.sqrt(squares.mean() / (NUMBERS**2).mean()))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_error_is_at_most_that_of_llama_cpp(grid):
    bound = LARGEST_ERROR.get(grid)
    if bound is None:
        kind = GGMLQuantizationType[grid]
        bound = error(quantize_as_gguf(NUMBERS.T.copy(), kind), grid)
    assert error(round_to_grid(NUMBERS, grid), grid) <= bound


@pytest.mark.parametrize("grid", ["Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("spread", [1, 6])  # the latter as in SmolLM2
def test_moments_lower_the_error_where_they_are_large(grid, spread):
    drawn = np.random.default_rng(1).standard_normal(512)
    moments = np.exp(spread * drawn).astype(np.float32)
    with_moments = round_to_grid(NUMBERS, grid, moments)
    plain = round_to_grid(NUMBERS, grid)
    assert error(with_moments, grid, moments) < error(plain, grid, moments)
    # A recipe of GPTQ has the moments of all pairs of inputs, for its head too.
    found = quantize(NUMBERS, Recipe(grid.lower()), np.diag(moments))
    np.testing.assert_array_equal(found.data, with_moments)


@pytest.mark.parametrize("grid", GRIDS)
def test_what_a_type_can_hold_is_held(grid):
    """Zeros, equal numbers, and rows that fill no block."""
    matrix = np.zeros((300, 3), np.float32)
    matrix[:, 1], matrix[:, 2] = 0.5, -0.25
    found = dequantize(round_to_grid(matrix, grid), GGMLQuantizationType[grid])
    np.testing.assert_allclose(found[:, :300].T, matrix, rtol=0.02)
