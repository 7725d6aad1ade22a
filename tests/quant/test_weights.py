import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize
from gguf import quantize as quantize_as_gguf
from onnx import TensorProto, helper, numpy_helper

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import BundleError, CheckpointError, OptionError
from jetdraft.export.fusing import fuse
from jetdraft.export.step import Step, buffer_sizes
from jetdraft.export.tracer import trace
from jetdraft.quant.algorithms import ALGORITHMS, quantize
from jetdraft.quant.grids import GRIDS
from jetdraft.quant.rounding import round_to_grid
from jetdraft.quant.weights import Quantization
from jetdraft.recipe import ALGORITHMS as NAMES
from jetdraft.recipe import BLOCK_SIZES, HEAD, SYMMETRIC, Recipe
from tests import cases
from tests.tiny import VOCAB_SIZE, drafter_config, save_checkpoint

HEAD_NAME = "lm_head.weight"
# The hidden size: a multiple of the block size 16 only.
WIDTH = 48
RECIPES = [Recipe(scheme, size) for scheme in ("int4", "int8") for size in BLOCK_SIZES]


def float_graph(folder: Path, tied: bool) -> bytes:
    config = drafter_config(hidden_size=WIDTH, head_dim=16, tie_word_embeddings=tied)
    save_checkpoint(folder, config, tokenizer=False)
    checkpoint = Checkpoint.load(str(folder), torch.float32)
    model = checkpoint.model
    contract = StepContract(VOCAB_SIZE, 32, 8, "float32", buffer_sizes(model).kv_shapes)
    step = trace(Step(model, contract), checkpoint.weight_names())
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
    Quantization(recipe, HEAD_NAME).apply(model)
    return model


def read(data: bytes) -> ir.Model:
    return ir.from_proto(onnx.load_from_string(data))


def nodes(model: ir.Model, kind: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == kind]


def constant(value: ir.Value) -> np.ndarray:
    return value.const_value.numpy()


def dequantized(product: ir.Node) -> np.ndarray:
    packed, scales = constant(product.inputs[1]), constant(product.inputs[2])
    bits = product.attributes.get_int("bits")
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    columns = product.attributes.get_int("N")
    whole = packed.reshape(columns, scales.shape[1], -1).astype(np.float32)
    whole = (whole - 2 ** (bits - 1)) * scales[:, :, None]
    return whole.reshape(columns, -1)[:, : product.attributes.get_int("K")].T


def float_matrices(data: bytes) -> list[np.ndarray]:
    matrices = []
    for node in nodes(read(data), "MatMul"):
        turn = node.inputs[1].producer()
        if turn is not None and turn.op_type == "Transpose":
            matrices.append(constant(turn.inputs[0]).T)
        else:
            matrices.append(constant(node.inputs[1]))
    return matrices


def evaluate(model: ir.Model, inputs, output: ir.Value, feed: np.ndarray) -> np.ndarray:
    part = ir.convenience.extract(model.graph, inputs, [output])
    proto = ir.to_proto(ir.Model(part, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    [name] = [value.name for value in session.get_inputs()]
    return session.run(None, {name: feed})[0]


def test_every_product_becomes_a_quantized_one(tied, quantized, recipe):
    products = nodes(quantized, "MatMulNBits")
    # Query-key-value, output, gate-up, down, head.
    assert len(products) == len(float_matrices(tied)) == 5
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
        assert (np.abs(actual - rows @ matrix) <= 1.01 * bound + 1e-5).all()


def readers_of_float_matrices(model: ir.Model) -> set[str]:
    return {
        node.op_type
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and len(value.shape) > 1
        for node in value.consumers()
    }


def test_no_float_matrix_remains_and_embedding_rows_are_columns_of_the_head(quantized):
    """Tables of positions and scales are floats."""
    readers = readers_of_float_matrices(quantized)
    assert readers == {"GroupQueryAttention", "MatMulNBits", "GatherBlockQuantized"}
    head = nodes(quantized, "MatMulNBits")[-1]
    np.testing.assert_array_equal(all_embeddings(quantized), dequantized(head).T)


def test_tied_embedding_reads_the_one_packed_matrix_of_the_head(quantized):
    [gather] = nodes(quantized, "GatherBlockQuantized")
    head = nodes(quantized, "MatMulNBits")[-1]
    assert gather.inputs[0] is head.inputs[1]
    assert [
        value
        for value in quantized.graph.initializers.values()
        if value.dtype == ir.DataType.UINT8 and value.shape[0] == VOCAB_SIZE
    ] == [head.inputs[1]]


def test_embedding_of_its_own_stays_a_float_lookup(tmp_path):
    model = with_recipe(float_graph(tmp_path, tied=False), Recipe("int4", 32))
    assert len(nodes(model, "MatMulNBits")) == 5
    assert not nodes(model, "GatherBlockQuantized")
    readers = readers_of_float_matrices(model)
    assert readers == {"GroupQueryAttention", "MatMulNBits", "Gather"}


def test_nothing_is_printed_or_logged_and_progress_counts_up(tied, capfd, caplog):
    model, seen = read(tied), []
    with caplog.at_level("WARNING"):
        Quantization(Recipe("int4", 32)).apply(model, lambda *step: seen.append(step))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert seen == [(done, 5) for done in range(1, 6)]


def test_without_quantization_the_graph_stays_as_it_is(tied):
    model = read(tied)
    Quantization(Recipe("none")).apply(model)
    assert ir.to_proto(model).SerializeToString() == tied


@cases("name", "int4-k_quant-b32", "int4-hqq-b16", "int8-k_quant-b64")
def test_a_tied_embedding_has_the_zeros_too(tied, name):
    """Rows of the embedding are the columns of the head."""
    recipe = Recipe.parse(name)
    model = with_recipe(tied, recipe)
    [gather] = nodes(model, "GatherBlockQuantized")
    assert gather.inputs[0] is nodes(model, "MatMulNBits")[-1].inputs[1]
    round_matrix, floats = ALGORITHMS[recipe.algorithm], float_matrices(tied)[-1]
    rounded = round_matrix(floats, recipe.bits, recipe.block_size, None).floats
    assert rounded.shape == (WIDTH, VOCAB_SIZE)
    np.testing.assert_allclose(all_embeddings(model), rounded.T, rtol=1e-5, atol=1e-6)


def all_embeddings(model: ir.Model) -> np.ndarray:
    [gather] = nodes(model, "GatherBlockQuantized")
    rows = gather.outputs[0]
    # Blocks are joined, and cut where the last one is not full.
    while (reader := rows.consumers()[0]).op_type in ("Reshape", "Slice"):
        rows = reader.outputs[0]
    ids = np.arange(VOCAB_SIZE)[None]
    return evaluate(model, [model.graph.inputs[0]], rows, ids)[0]


def test_the_head_can_have_other_bits(tied):
    model = with_recipe(tied, Recipe.parse("int4-b16-head8"))
    bits = [n.attributes.get_int("bits") for n in nodes(model, "MatMulNBits")]
    assert sorted(bits) == [4] * 4 + [8]
    floats = with_recipe(tied, Recipe.parse("int4-b16-headnone"))
    assert len(nodes(floats, "MatMulNBits")) == 4
    assert not nodes(floats, "GatherBlockQuantized")


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_by_name(tied, number):
    model = read(tied)
    node = next(node for node in model.graph if node.op_type == "MatMul")
    array = constant(node.inputs[1]).copy()
    array[3, 4] = number
    node.inputs[1].const_value = ir.tensor(array)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj"):
        Quantization(Recipe("int4", 32)).apply(model)


def test_names_of_recipes():
    right = "int4-rtn-b128 int8-gptq-b32 int2-hqq-b16-head8 none q3_k-gptq-up2-headq4_k"
    for name in f"{right} int4-gptq-b64-up0.11-head8-kv8".split():
        assert Recipe.parse(name).name == name
        assert Recipe.from_json(Recipe.parse(name).to_json()).name == name
    assert Recipe.parse("int4", 64) == Recipe("int4", 64)
    assert Recipe.parse("int4-headnone").of_unit(HEAD).bits is None
    wrongs = "int3 int4-best int4-b31 int4-b0 int4-head9 int4- int8-up0 int4-up"
    for wrong in ("", *wrongs.split(), "none-head8"):
        with pytest.raises(OptionError):
            Recipe.parse(wrong)


@cases(
    "name, reason",
    ("int4-awq-b32", "unknown algorithm 'awq'; choose rtn, k_quant, hqq, gptq"),
    ("int4-kv4", "unknown quantization of the KV cache 'int4'; choose int8"),
)
def test_recipes_that_are_gone_are_refused_with_the_choices(name, reason):
    with pytest.raises(OptionError, match=re.escape(reason)):
        Recipe.parse(name)


def test_a_bundle_with_a_recipe_that_is_gone_must_be_exported_again():
    fields = {**Recipe().to_json(), "algorithm": "awq"}
    with pytest.raises(BundleError, match=r"'awq'.*; export the bundle again"):
        Recipe.from_json(fields)


def test_the_standard_flavour_has_no_zeros():
    with pytest.raises(OptionError, match="choose rtn or gptq"):
        Quantization(Recipe.parse("int4-hqq"), standard=True)


# Rows are a multiple of the smallest block size only.
ROWS, COLUMNS = 72, 24
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


def by_algorithm(name, bits, block=32, weights=None):
    weights = matrix() if weights is None else weights
    return ALGORITHMS[name](weights, bits, block, moments(inputs()))


def test_the_names_are_those_of_recipes():
    assert tuple(ALGORITHMS) == NAMES


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_computes_with_the_same_numbers(name, bits):
    blocks = by_algorithm(name, bits)
    names = ["x", "b", "scales"]
    arrays = {"b": blocks.packed, "scales": blocks.scales}
    if blocks.packed_zeros is not None:
        names.append("zeros")
        arrays["zeros"] = blocks.packed_zeros
    sizes = {"K": ROWS, "N": COLUMNS, "bits": bits, "block_size": 32}
    sizes |= {"domain": "com.microsoft"}
    node = helper.make_node("MatMulNBits", names, ["y"], **sizes)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", ROWS), ("y", COLUMNS))
    )
    constants = [numpy_helper.from_array(array, key) for key, array in arrays.items()]
    graph = helper.make_graph([node], "g", [x], [y], constants)
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
    blocks, weights = by_algorithm(name, bits, block), matrix()
    steps = np.repeat(np.abs(blocks.scales), block, 1)[:, :ROWS].T
    # Half a step; values of the other sign up to one step, and least squares cuts more.
    limit = 1.01 if name == "rtn" else 2.0
    assert np.abs(blocks.floats - weights).max() <= (limit * steps).max() + 1e-6
    assert blocks.integers.shape == (COLUMNS, -(-ROWS // block), block)
    assert blocks.integers.max() < 1 << bits


@pytest.mark.parametrize("name", NAMES)
def test_only_asymmetric_algorithms_have_zeros(name):
    assert (by_algorithm(name, 4).zeros is None) == (name in SYMMETRIC)


@pytest.mark.parametrize("name", ["k_quant", "hqq"])
def test_zeros_help_where_blocks_are_not_about_0(name):
    weights = matrix(offset=0.8)
    errors = [
        np.square(by_algorithm(algorithm, 4, weights=weights).floats - weights).sum()
        for algorithm in (name, "rtn")
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("scheme", ["int4", *GRIDS])
def test_gptq_lowers_the_error_of_outputs(scheme):
    weights, x = matrix(), inputs()
    errors, both = {}, moments(x)
    for name, given in (("", both.diagonal()), ("-gptq", both)):
        difference = quantize(weights, Recipe.parse(scheme.lower() + name), given)
        difference = difference.floats - weights
        errors[name] = np.square(x @ difference).sum(), np.square(difference).sum()
    assert errors["-gptq"][0] < 0.5 * errors[""][0]
    assert errors["-gptq"][1] > errors[""][1]


def test_gptq_of_uncorrelated_inputs_is_rounding():
    blocks = ALGORITHMS["gptq"](matrix(), 4, 16, np.eye(ROWS))
    same = blocks.floats == by_algorithm("rtn", 4, 16).floats
    assert same.mean() > 0.99, "but for ties"


def test_gptq_takes_inputs_that_were_always_0():
    seen = moments(inputs())
    seen[5], seen[:, 5] = 0, 0
    blocks = ALGORITHMS["gptq"](matrix(), 4, 32, seen)
    assert np.isfinite(blocks.floats).all()
    assert np.abs(blocks.floats[5] - matrix()[5]).max() < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_of_zeros(name):
    blocks = by_algorithm(name, 4, weights=np.zeros((ROWS, COLUMNS), np.float32))
    assert np.array_equal(blocks.floats, np.zeros((ROWS, COLUMNS)))


NUMBERS = np.random.default_rng(0).standard_t(6, (512, 48)).astype(np.float32)

# Of the types that the package gguf cannot round to, relative.
LARGEST_ERROR = {"Q3_K": 0.171, "Q4_K": 0.084, "Q5_K": 0.043, "Q6_K": 0.0215}


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


@pytest.mark.parametrize("grid", ["Q4_0", "Q4_1", "Q3_K", "Q4_K", "Q6_K"])
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
    matrix = np.zeros((300, 3), np.float32)
    matrix[:, 1], matrix[:, 2] = 0.5, -0.25
    found = dequantize(round_to_grid(matrix, grid), GGMLQuantizationType[grid])
    np.testing.assert_allclose(found[:, :300].T, matrix, rtol=0.02)
