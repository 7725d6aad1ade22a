from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from jetdraft.contract import StepContract
from jetdraft.export.checkpoint import Checkpoint
from jetdraft.export.fusion import fuse
from jetdraft.export.step import kv_shapes, trace
from jetdraft.quant.recipe import BLOCK_SIZES, Recipe
from jetdraft.quant.weights import quantize
from tests.tiny import VOCAB_SIZE, drafter_config, save_checkpoint

WIDTH = 48
"""Of the hidden rows: no multiple of any block size but 16."""

RECIPES = [Recipe(scheme, size) for scheme in ("int4", "int8") for size in BLOCK_SIZES]


def float_graph(folder: Path, tied: bool) -> bytes:
    """A fused step graph before quantization."""
    config = drafter_config(hidden_size=WIDTH, head_dim=16, tie_word_embeddings=tied)
    save_checkpoint(folder, config, tokenizer=False)
    model = Checkpoint.load(str(folder), torch.float32).model
    contract = StepContract(VOCAB_SIZE, 32, 8, "float32", kv_shapes(model))
    step = trace(model, contract)
    fuse(step, contract)
    return ir.to_proto(step).SerializeToString()


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> bytes:
    return float_graph(tmp_path_factory.mktemp("tied"), True)


@pytest.fixture(params=RECIPES, ids=lambda r: f"{r.scheme}-{r.block_size}")
def recipe(request) -> Recipe:
    return request.param


@pytest.fixture
def quantized(tied, recipe) -> ir.Model:
    return with_recipe(tied, recipe)


def with_recipe(data: bytes, recipe: Recipe) -> ir.Model:
    model = read(data)
    quantize(model, recipe, lambda done, of: None)
    return model


def read(data: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_from_string(data))


def nodes(model: ir.Model, kind: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == kind]


def constant(value: ir.Value) -> np.ndarray:
    return value.const_value.numpy()


def dequantized(product: ir.Node) -> np.ndarray:
    """The float matrix [K, N] that a MatMulNBits stands for."""
    packed, scales = constant(product.inputs[1]), constant(product.inputs[2])
    bits = product.attributes.get_int("bits")
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    columns = product.attributes.get_int("N")
    whole = packed.reshape(columns, scales.shape[1], -1).astype(np.float32)
    whole = (whole - 2 ** (bits - 1)) * scales[:, :, None]
    return whole.reshape(columns, -1)[:, : product.attributes.get_int("K")].T


def float_matrices(data: bytes) -> list[np.ndarray]:
    """The constant matrices of all MatMuls, in graph order."""
    found = []
    for node in nodes(read(data), "MatMul"):
        turn = node.inputs[1].producer()
        if turn is not None and turn.op_type == "Transpose":
            found.append(constant(turn.inputs[0]).T)
        else:
            found.append(constant(node.inputs[1]))
    return found


def evaluate(model: ir.Model, inputs, output: ir.Value, feed: np.ndarray) -> np.ndarray:
    """The part of the graph between, run by onnxruntime."""
    part = ir.convenience.extract(model.graph, inputs, [output])
    part_model = ir.Model(part, ir_version=10)
    session = onnxruntime.InferenceSession(
        ir.to_proto(part_model).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    [name] = [value.name for value in session.get_inputs()]
    return session.run(None, {name: feed})[0]


def test_every_product_becomes_a_quantized_one(tied, quantized, recipe):
    products = nodes(quantized, "MatMulNBits")
    matrices = float_matrices(tied)
    # Query-key-value, output, gate-up, down, head.
    assert len(products) == len(matrices) == 5
    assert not nodes(quantized, "MatMul")
    for product in products:
        assert product.attributes.get_int("bits") == recipe.bits
        assert product.attributes.get_int("block_size") == recipe.block_size
        assert product.attributes.get_int("accuracy_level") == 4


def test_dequantized_matrix_is_the_float_one_rounded(tied, quantized, recipe):
    products = nodes(quantized, "MatMulNBits")
    for product, matrix in zip(products, float_matrices(tied), strict=True):
        error = np.abs(dequantized(product) - matrix)
        scales = np.abs(constant(product.inputs[2])).repeat(recipe.block_size, axis=1)
        scales = scales[:, : len(matrix)].T
        # Half a step, but the far end of the range is cut off by up to one.
        assert (error <= 1.001 * scales).all()
        assert (error <= 0.501 * scales).mean() > 0.9


def test_product_equals_a_float_one_within_activation_rounding(quantized, recipe):
    random = np.random.default_rng(0)
    for product in nodes(quantized, "MatMulNBits"):
        matrix = dequantized(product)
        rows = random.normal(size=(1, 5, len(matrix))).astype(np.float32)
        actual = evaluate(quantized, [product.inputs[0]], product.outputs[0], rows)
        # Activations become int8 with one step per block: half a step each, at most.
        size = recipe.block_size
        blocks = np.pad(rows, ((0, 0), (0, 0), (0, -len(matrix) % size)))
        steps = np.abs(blocks.reshape(1, 5, -1, size)).max(axis=-1) / 127
        steps = steps.repeat(size, axis=-1)[..., : len(matrix)]
        bound = 0.5 * steps @ np.abs(matrix)
        error = np.abs(actual - rows @ matrix)
        assert (error <= 1.01 * bound + 1e-5).all()


def readers_of_float_matrices(model: ir.Model) -> set[str]:
    """Operators that read a float constant of two or more axes."""
    return {
        node.op_type
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and len(value.shape) > 1
        for node in value.consumers()
    }


def test_no_float_matrix_remains_beside_tables_and_scales(quantized):
    assert readers_of_float_matrices(quantized) == {
        "GroupQueryAttention",
        "MatMulNBits",
        "GatherBlockQuantized",
    }


def test_tied_embedding_reads_the_one_packed_matrix_of_the_head(quantized):
    [gather] = nodes(quantized, "GatherBlockQuantized")
    head = nodes(quantized, "MatMulNBits")[-1]
    assert gather.inputs[0] is head.inputs[1]
    of_vocabulary = [
        value
        for value in quantized.graph.initializers.values()
        if value.dtype == ir.DataType.UINT8 and value.shape[0] == VOCAB_SIZE
    ]
    assert of_vocabulary == [head.inputs[1]]


def test_embedding_rows_are_exactly_the_columns_of_the_head(quantized):
    [gather] = nodes(quantized, "GatherBlockQuantized")
    rows = gather.outputs[0]
    # Blocks are joined, and cut where the last one is not full.
    while (reader := rows.consumers()[0]).op_type in ("Reshape", "Slice"):
        rows = reader.outputs[0]
    ids = np.arange(VOCAB_SIZE)[None]
    found = evaluate(quantized, [quantized.graph.inputs[0]], rows, ids)
    head = nodes(quantized, "MatMulNBits")[-1]
    np.testing.assert_array_equal(found[0], dequantized(head).T)


def test_embedding_of_its_own_stays_a_float_lookup(tmp_path):
    model = with_recipe(float_graph(tmp_path, tied=False), Recipe("int4", 32))
    assert len(nodes(model, "MatMulNBits")) == 5
    assert not nodes(model, "GatherBlockQuantized")
    readers = readers_of_float_matrices(model)
    assert readers == {"GroupQueryAttention", "MatMulNBits", "Gather"}


def test_nothing_is_printed_or_logged_and_progress_counts_up(tied, capfd, caplog):
    model, seen = read(tied), []
    with caplog.at_level("WARNING"):
        quantize(model, Recipe("int4", 32), lambda *step: seen.append(step))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert seen == [(done, 5) for done in range(1, 6)]


def test_without_quantization_the_graph_stays_as_it_is(tied):
    model = read(tied)
    quantize(model, Recipe("none"), lambda *_: pytest.fail("nothing to report"))
    assert ir.to_proto(model).SerializeToString() == tied
