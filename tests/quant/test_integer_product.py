from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.quant.algorithms import LARGEST_W8, whole_columns
from jetdraft.quant.blocks import Blocks
from jetdraft.quant.divergence import round_to_int8
from jetdraft.quant.edits import Maker
from jetdraft.quant.weights import add_int8_columns, integer_product
from jetdraft.recipe import HEAD, Recipe
from tests.quant.test_weights import (
    VOCAB_SIZE,
    float_graph,
    float_matrices,
    nodes,
    with_recipe,
)

ROWS, COLUMNS = 96, 40


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> bytes:
    return float_graph(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    random = np.random.default_rng(5)
    return random.standard_normal((ROWS, COLUMNS)).astype(np.float32)


def compute(matrix: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """The product as onnxruntime computes it."""
    blocks = whole_columns(matrix)
    read = ir.Value(
        name="x", shape=ir.Shape(["n", ROWS]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    graph = ir.Graph([read], [], nodes=[], opset_imports={"": 21, "com.microsoft": 1})
    result = integer_product(
        Maker(graph), read, add_int8_columns(graph, "w", blocks), blocks
    )
    result.name, result.dtype = "y", ir.DataType.FLOAT
    graph.outputs.append(result)
    proto = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        proto, options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": inputs})[0]


def test_the_kernel_computes_with_the_numbers_that_are_measured(matrix):
    """KL is measured with inputs that `round_to_int8` rounds."""
    inputs = np.random.default_rng(6).standard_normal((7, ROWS)).astype(np.float32)
    read = round_to_int8(torch.from_numpy(inputs), ROWS).numpy()
    expected = read @ whole_columns(matrix).floats
    np.testing.assert_allclose(compute(matrix, inputs), expected, atol=1e-4)


def test_a_row_is_the_same_at_every_width(matrix):
    """Bit by bit: sums of integers do not depend on their order."""
    random = np.random.default_rng(7)
    inputs = random.standard_normal((24, ROWS)).astype(np.float32)
    alone = np.concatenate([compute(matrix, row[None]) for row in inputs])
    for width in range(2, len(inputs) + 1):
        assert np.array_equal(compute(matrix, inputs[:width]), alone[:width])


def test_the_largest_products_do_not_overflow():
    """AVX2 adds two products in 16 bits; VNNI, which does not, cannot fail here."""
    signs = np.array([1, -1], np.float32)[np.arange(COLUMNS) % 2]
    matrix = np.full((ROWS, COLUMNS), 0.5, np.float32) * signs
    inputs = np.array([1, -1], np.float32)[:, None].repeat(ROWS, 1)
    np.testing.assert_allclose(compute(matrix, inputs), inputs @ matrix, rtol=1e-6)


def test_rows_and_columns_of_zeros_are_zeros(matrix):
    inputs = np.ones((3, ROWS), np.float32)
    inputs[1] = 0
    matrix = matrix.copy()
    matrix[:, 4] = 0
    result = compute(matrix, inputs)
    assert not result[1].any()
    assert not result[:, 4].any()
    assert np.isfinite(result).all()
    assert result[0].any()


def test_a_weight_is_off_by_half_a_step(matrix):
    blocks = whole_columns(matrix)
    steps = np.abs(matrix).max(0) / LARGEST_W8
    assert (np.abs(blocks.floats - matrix) <= 0.501 * steps).all()
    assert np.abs(blocks.integers.astype(int) - 128).max() == LARGEST_W8


def test_every_product_becomes_one_of_integers(tied):
    model = with_recipe(tied, Recipe("w8a8"))
    assert len(nodes(model, "MatMulIntegerToFloat")) == len(float_matrices(tied)) == 5
    assert not nodes(model, "MatMul")
    assert not nodes(model, "MatMulNBits")


def test_a_tied_embedding_reads_the_columns_of_the_head(tied):
    model = with_recipe(tied, Recipe("w8a8"))
    head = nodes(model, "MatMulIntegerToFloat")[-1]
    gathers = [n for n in nodes(model, "Gather") if n.inputs[0] is head.inputs[1]]
    assert len(gathers) == 1
    last = gathers[0]
    while last.op_type != "Mul":
        last = last.outputs[0].consumers()[0]
    part = ir.convenience.extract(
        model.graph, [model.graph.inputs[0].name], [last.outputs[0].name]
    )
    proto = ir.to_proto(ir.Model(part, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    ids = np.arange(VOCAB_SIZE)[None]
    rows = session.run(None, {"input_ids": ids})[0]
    expected = whole_columns(float_matrices(tied)[-1]).floats.T
    np.testing.assert_array_equal(rows[0], expected)


def test_the_head_alone(tied):
    model = with_recipe(tied, Recipe.parse("int4-b16-headw8a8"))
    assert len(nodes(model, "MatMulNBits")) == 4
    assert len(nodes(model, "MatMulIntegerToFloat")) == 1


def test_layers_have_an_algorithm_and_the_head_none():
    recipe = Recipe.parse("int4-gptq-b32-headw8a8")
    assert recipe.of_unit("0").algorithm == "gptq"
    assert not recipe.of_unit(HEAD).needs_moments


def test_matrices_can_be_joined_and_cut(matrix):
    blocks = whole_columns(matrix)
    joined = Blocks.concatenated([blocks.select_columns(np.arange(9)), blocks])
    assert joined.whole
    assert joined.form == blocks.form
    assert joined.form != dataclasses.replace(blocks, whole=False).form
    assert np.array_equal(joined.floats[:, 9:], blocks.floats)


@pytest.mark.parametrize(
    "name", ["w8a8", "int4-rtn-b64-headw8a8", "w8a8-b32-head8-kv8", "w8a8-headnone"]
)
def test_its_names(name):
    assert Recipe.parse(name).name == name
    assert Recipe.from_json(Recipe.parse(name).to_json()) == Recipe.parse(name)
    assert Recipe.parse("w8a8", 64) == Recipe.parse("w8a8")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Recipe.parse("w8a8-gptq"), "leave gptq out, or choose int8"),
        (lambda: Recipe.parse("w8a8-b64"), "w8a8 has no blocks; leave b64 out"),
        (lambda: Recipe.parse("w8a8-up0"), "choose int2 or int4"),
        (lambda: Recipe("w8a8").check_standard(), "choose int8, or the contrib"),
        (
            lambda: ExportOptions(Recipe("w8a8"), provider="cuda"),
            "cuda in fp16 has no kernel for w8a8; choose int8, or --provider cpu",
        ),
        (
            lambda: ExportOptions(Recipe("w8a8"), provider="tensorrt"),
            "tensorrt in fp16 has no kernel for w8a8",
        ),
        (
            lambda: ExportOptions(Recipe("int4", head="w8a8"), dtype="fp16"),
            "cpu in fp16 has no kernel for int4-.*-headw8a8; .* --dtype fp32",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(make, reason):
    with pytest.raises(OptionError, match=reason):
        make()
