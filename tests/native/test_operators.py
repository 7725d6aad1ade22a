"""Operators compute what llama.cpp's types, attention and torch do, in any pass."""

import os
import sys
from copy import copy

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from jetdraft.checkpoints.recurrence import causal_convolution, linear_attention
from jetdraft.contracts.tensors import HIDDEN, WIDEST
from jetdraft.errors import ContractError
from jetdraft.export.fusing import fuse_products
from jetdraft.native import DOMAIN
from jetdraft.quant.grids import GRIDS, LAYOUT_VERSION
from jetdraft.runtime.passes.buffers import run_bound
from tests import cases
from tests.native import operators
from tests.native.operators import Attending, random_matrix, run, run_experts, session
from tests.programs import ended

SHAPES = ((48, 512), (40, 200), (7, 31))
SHORT = np.zeros(8, np.uint8)
ROTATED = {"do_rotary": 1}
ATTENTIONS = {
    "plain": Attending(packed=False),
    "rotated": Attending(**ROTATED),
    "interleaved": Attending(3, 1, 32, **ROTATED, rotary_interleaved=1),
    "wide heads": Attending(6, 2, 128, **ROTATED),
    "a head of keys for each": Attending(3, 3, 16),
    "a size of no whole vector": Attending(3, 1, 20),
    "less than a vector": Attending(4, 2, 6, packed=False),
    "window": Attending(local_window_size=9, **ROTATED),
    "softcap": Attending(softcap=1.5),
    "sinks": Attending(sinks=True, **ROTATED),
    "sinks and a window": Attending(sinks=True, local_window_size=9),
}
ROWS, BUFFERS, ENDS = "rows of another width", "buffers of another", "do not fit into"
TABLES, HEADS = "tables or positions of another shape", "numbers of heads"
UNALIGNED = np.zeros(3 * 512 * 4 + 1, np.uint8)[1:].view(np.float32)
TEXT_ROWS = 40
CASES = {
    "delta": lambda: delta_rule(3, 3, 128, 128, 2),
    "mamba": lambda: delta_rule(4, 2, 16, 83, 1),
    "tiny": lambda: delta_rule(2, 1, 8, 4, 2),
    "window of 4": lambda: convolution(6144, 4, has_bias=False),
    "window of 3": lambda: convolution(7, 3, has_bias=True),
}
BY_ROW = [(1, 1)] * TEXT_ROWS
OUTCOMES = [(16, n) for n in (1, 16, 7)] + [(4, 1), (4, 4), (3, 0), (3, 3), (1, 1)]
WAYS = {
    "in part": [*OUTCOMES, *[(1, 1)] * 7],
    "a wide pass first": [(20, 20), (2, 1), (19, 19)],
    "a wide pass after kept rows": [(5, 3), (17, 17), (4, 4), (1, 1), (15, 15)],
}


def floats(*shape):
    return np.zeros(shape, np.float32)


def rounded_to_int8(x):
    """Rows as the operator reads them: int8 in blocks of 32."""
    blocks = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    integers = np.rint(blocks / np.where(scales == 0, 1, scales))
    return (integers * scales).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float64)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_product_is_exact_but_for_rounded_rows(grid, columns, rows):
    matrix = random_matrix(grid, columns, rows)
    x = np.random.default_rng(1).standard_normal((19, rows)).astype(np.float32)
    x[3], x[5, : rows // 2] = 0, 0
    expected = rounded_to_int8(x) @ matrix.floats.astype(np.float64)
    found = run("MatMulPacked", matrix, x)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def gated(grid, columns, rows):
    """A matrix, its rows and gates, and the other fields of MatMulGated."""
    random = np.random.default_rng(1)
    x, bias = (random.standard_normal(n, "f4") for n in ((19, 2 * rows), columns))
    fields = {"linear": 1.5957691, "cubic": 0.07135482, "bias": bias}
    return random_matrix(grid, columns, rows), x, fields


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_product_reads_gated_rows_and_adds_a_bias(grid, columns, rows):
    matrix, x, fields = gated(grid, columns, rows)
    gates, passed = torch.from_numpy(x).split(rows, 1)
    silu = {**fields, "linear": 1.0, "cubic": 0.0}
    for gate, factors in (("silu", silu), ("gelu", fields)):
        how = {"approximate": "tanh"} if gate == "gelu" else {}
        read = getattr(torch.nn.functional, gate)(gates, **how) * passed
        expected = run("MatMulPacked", matrix, read.numpy()) + fields["bias"]
        found = run("MatMulGated", matrix, x, **factors)
        # Where torch's last bit is another, a number is rounded to the next integer.
        np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())
    np.testing.assert_array_equal(
        run("MatMulPacked", matrix, x[:, :rows], bias=fields["bias"]),
        run("MatMulPacked", matrix, x[:, :rows]) + fields["bias"],
    )


@cases(
    "outputs, axis, gate, fuses",
    (["g", "up"], -1, {"approximate": "tanh"}, True),
    (["up", "g"], -1, {"approximate": "tanh"}, False),
    (["g", "up"], 1, {"approximate": "tanh"}, False),
    (["g", "up"], -1, {}, False),
)
def test_only_gates_before_numbers_are_fused(outputs, axis, gate, fuses):
    nodes = [
        helper.make_node("Split", ["x"], outputs, axis=axis, num_outputs=2),
        helper.make_node("Gelu", ["g"], ["share"], **gate),
        helper.make_node("Mul", ["share", "up"], ["read"]),
        helper.make_node("MatMulPacked", ["read", *"is"], ["y"], domain=DOMAIN),
    ]
    ends = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names]
        for names in (("x", *"is"), "y")
    )
    model = ir.from_proto(helper.make_model(helper.make_graph(nodes, "gates", *ends)))
    fuse_products(model)
    kinds = {node.op_type for node in model.graph}
    assert kinds == ({"MatMulGated"} if fuses else {node.op_type for node in nodes})


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("columns", [48, 400])
def test_no_bit_of_a_product_depends_on_the_pass_or_threads(grid, threads, columns):
    matrix, x, fields = gated(grid, columns, 512)
    for kind, rows, more in (("Packed", x[:, :512], {}), ("Gated", x, fields)):
        one, other = (
            session(f"MatMul{kind}", matrix, threads=count, **more)
            for count in (1, threads)
        )
        whole = one.run(None, {"x": rows})[0]
        for width in range(1, 19):
            part = other.run(None, {"x": rows[19 - width :]})[0]
            np.testing.assert_array_equal(part, whole[19 - width :])


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("columns", "rows"), SHAPES)
def test_a_column_is_gathered_exactly(grid, columns, rows):
    matrix = random_matrix(grid, columns, rows)
    ids = np.array([[0, columns - 1], [columns // 2, 0]])
    found = run("GatherPacked", matrix, ids)
    np.testing.assert_array_equal(found, matrix.floats.T[ids])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(bad):
    matrix, x = random_matrix("Q4_0", 32, 64), np.ones((3, 64), np.float32)
    plain = run("MatMulPacked", matrix, x)
    x[1, 40] = bad
    found = run("MatMulPacked", matrix, x)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], plain[[0, 2]])


def test_a_pass_may_have_no_rows():
    found = run("MatMulPacked", random_matrix("Q8_0", 32, 64), np.ones((0, 64), "f4"))
    assert found.shape == (0, 32)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_bits_of_its_expert_alone(grid, threads):
    random, columns, count = np.random.default_rng(1), 176, 5
    stack = random_matrix(grid, count * columns, 288)
    x = random.standard_normal((23, 288)).astype(np.float32)
    parts = np.split(np.arange(count * columns), count)
    alone = [run("MatMulPacked", stack.select_columns(part), x) for part in parts]
    for ids in (random.integers(0, count, 23), np.full(23, 3), np.arange(23) % 2 * 4):
        for rows in (23, 9, 1, 0):
            some = ids[:rows]
            found = run_experts(stack, x[:rows], some, count, threads=threads)
            expected = [alone[e][row] for row, e in enumerate(some)]
            np.testing.assert_array_equal(found, np.reshape(expected, (rows, columns)))


@cases(
    "ids, changed, reason",
    ([0, 3], {}, "there is no expert 3 among 3"),
    ([0, -1], {}, "there is no expert -1 among 3"),
    ([0], {}, "another shape"),
    ([[0, 1]], {}, "another shape"),
    ([0, 1], {"K": 60}, "another shape"),
    ([0, 1], {"integers": np.zeros(0, np.uint8)}, "another size"),
    ([0, 1], {"integers": SHORT}, "another size"),
    ([0, 1], {"integers": np.zeros(2048, np.uint8)}, "more integers than scales"),
)
def test_damaged_experts_are_refused(ids, changed, reason):
    matrix, x = random_matrix("Q4_0", 96, 64), np.ones((2, 64), "f4")
    with pytest.raises(Exception, match=reason):
        run_experts(matrix, x, ids, 3, **changed)


@cases(
    "changed, reason",
    ({"integers": SHORT}, "another size"),
    ({"scales": SHORT}, "another size"),
    ({"integers": SHORT.astype(np.float32)}, "float"),
    ({"N": 64}, "another size"),
    ({"K": 60}, "another width"),
    ({"K": 96}, "another size"),
    ({"N": 2**62}, "out of range"),
    ({"K": 0}, "out of range"),
    ({"K": -32}, "out of range"),
    ({"format": len(GRIDS)}, "unknown format"),
    ({"format": -1}, "unknown format"),
    ({"layout": 2}, "packed in layout 2, and this version reads layout 1"),
    ({"bias": floats(33)}, "a bias has another size"),
    ({"bias": floats(1, 32)}, "a bias has another size"),
)
def test_a_damaged_matrix_is_refused(changed, reason):
    matrix, x = random_matrix("Q4_0", 32, 64), np.ones((1, 64), "f4")
    with pytest.raises(Exception, match=reason):
        run("MatMulPacked", matrix, x, **changed)


@pytest.mark.parametrize("wrong", [-1, 32, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    matrix = random_matrix("Q4_0", 32, 64)
    said = f"the id {wrong} is not in the vocabulary of 32"
    with pytest.raises(Exception, match=said):
        run("GatherPacked", matrix, np.array([0, wrong]))


def run_isa(name):
    code = "from jetdraft import native; print(native.isa())"
    return ended(sys.executable, "-c", code, env={**os.environ, "JETDRAFT_ISA": name})


def test_the_environment_names_the_instructions():
    assert run_isa("portable").stdout == "portable\n"
    refused = run_isa("abacus")
    assert refused.returncode
    assert "'abacus' names no instructions of this" in refused.stderr


@pytest.fixture(params=ATTENTIONS)
def attention(request):
    return ATTENTIONS[request.param]


@pytest.mark.parametrize("width", [1, 7, 80])
def test_attention_is_close_to_onnxruntimes(attention, width):
    heads, size = attention.attributes["num_heads"], attention.buffer[1]
    more = ((0, 0), (0, 0), (0, -size % 8))
    whole = copy(attention)
    whole.buffer = attention.buffer[0], size + -size % 8
    parts = [np.pad(part.reshape(80, -1, size), more) for part in attention.parts]
    whole.parts = [part.reshape(1, 80, -1) for part in parts]
    window = attention.attributes["local_window_size"] or -1
    options = {"domain": "com.microsoft", "local_window_size": window}
    expected = whole.read(width, **options).reshape(80, heads, -1)[..., :size]
    found = attention.read(width).reshape(80, heads, -1)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_attention_gives_a_row_the_same_bits_everywhere(attention, monkeypatch):
    whole = attention.read(80)
    for width in (*range(1, 17), 64):
        found = attention.read(width, 80 + 7 * width, threads=1 + width % 2)
        np.testing.assert_array_equal(found, whole)
    monkeypatch.setenv("JETDRAFT_ISA", "portable")
    np.testing.assert_array_equal(attention.read(5), whole)


@pytest.mark.parametrize("heads", [1, 3])
def test_a_bias_is_added_for_all_heads_or_for_each(heads):
    attention = ATTENTIONS["a head of keys for each"]
    bias = np.random.default_rng(1).standard_normal((1, heads, 80, 96), "f4")
    parts = [p[0].reshape(80, 3, 16).transpose(1, 0, 2) for p in attention.parts]
    scores = parts[0] @ parts[1].transpose(0, 2, 1) / 4 + bias[0, :, :, :80]
    shares = np.exp(scores) * np.tri(80)
    expected = shares / shares.sum(-1, keepdims=True) @ parts[2]
    found = attention.read(9, bias=bias).reshape(80, 3, 16).transpose(1, 0, 2)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("width", [1, 4, 83])
def test_hidden_slots_change_no_bit_of_attention(width):
    rows = [*range(40), 7, 60, 3, *range(40, 80)]
    bias = np.zeros((1, 1, 83, 99), np.float32)
    bias[:, :, 43:, 40:43] = HIDDEN
    found = ATTENTIONS["rotated"].read(width, 99, bias, rows)
    whole = ATTENTIONS["rotated"].read(80)
    np.testing.assert_array_equal(np.delete(found, [40, 41, 42], axis=0), whole)


def attend(attention, rows, cursor, buffers, **changed):
    feeds = attention.feeds(rows, cursor, buffers)
    attributes = {n: changed.pop(n) for n in attention.attributes if n in changed}
    feeds |= changed
    return attention.session(feeds, **attributes).run(None, feeds)


def test_attention_writes_keys_and_values_into_buffers():
    attention = ATTENTIONS["plain"]
    _, *buffers = attend(attention, range(3), 2, attention.buffers(9))
    for buffer, rows in zip(buffers, attention.parts[1:], strict=True):
        by_head = rows[0, :3].reshape(3, 2, 64).transpose(1, 0, 2)
        np.testing.assert_array_equal(buffer[0, :, 2:5], by_head)
        assert not np.delete(buffer, [2, 3, 4], axis=2).any()


@pytest.mark.parametrize("domain", [DOMAIN, "com.microsoft"])
def test_attention_without_keys_reads_the_keys_of_another_layer(domain):
    attention = Attending(packed=False, do_rotary=1, local_window_size=7)
    buffers, rows = attention.buffers(80), range(80)
    y, *buffers = attend(attention, rows, 0, buffers)
    none = dict.fromkeys(("key", "value"), floats(1, 0, 128))
    for some in (rows[:1], rows[20:25], rows[40:80]):
        feeds = attention.feeds(some, some[0], buffers) | none
        opened = attention.session(feeds, outputs=1, domain=domain)
        found = opened.run(None, feeds)[0][0]
        np.testing.assert_allclose(found, y[0, some], atol=1e-5)
        if domain == DOMAIN:
            np.testing.assert_array_equal(found, y[0, some])


def test_attention_gives_buffers_where_it_makes_keys_and_only_there():
    attention = Attending(packed=False)
    feeds = attention.feeds(range(3), 0, attention.buffers(9))
    with pytest.raises(Exception, match="output 1 is missing"):
        attention.session(feeds, outputs=1).run(None, feeds)
    feeds |= dict.fromkeys(("key", "value"), floats(1, 0, 128))
    assert attention.session(feeds).run(None, feeds)[1:] == [None, None]


def test_attention_may_have_no_rows():
    attention = ATTENTIONS["rotated"]
    y, *buffers = attend(attention, [], 5, [b + 1 for b in attention.buffers(9)])
    assert y.shape == (1, 0, 256)
    assert all((buffer == 1).all() for buffer in buffers)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_spoils_its_row_only(bad):
    attention = Attending(packed=False)
    plain = attention.read(80)
    attention.parts[0][0, 40, :64] = bad
    found = attention.read(80)
    assert np.isnan(found[40, :64]).all()
    found[40, :64] = plain[40, :64]
    np.testing.assert_array_equal(found, plain)


@cases(
    "name, value, reason",
    ("query", floats(2, 3, 512), ROWS),
    ("query", UNALIGNED.reshape(1, 3, 512), "a multiple of its numbers' size"),
    ("key", floats(1, 3, 128), ROWS),
    ("past_key", floats(1, 2, 8, 64), BUFFERS),
    ("past_value", floats(1, 2, 9, 32), BUFFERS),
    ("last_row", np.array([1], np.int32), ENDS),
    ("last_row", np.array([2**31 - 1], np.int32), ENDS),
    ("last_row", np.zeros(0, np.int32), "the index of its last row"),
    ("last_row", np.array([5]), "int64"),
    ("cosines", floats(80, 31), TABLES),
    ("sines", floats(79, 32), TABLES),
    ("positions", np.array([[0, 1]]), TABLES),
    ("positions", np.array([[0, -1, 2]]), "position -1 has no row"),
    ("positions", np.array([[0, 1, 80]]), "position 80 has no row"),
    ("bias", floats(1, 1, 3, 5), "a bias of another shape"),
    ("bias", floats(1, 3, 3, 9), "a bias of another shape"),
    ("num_heads", 3, HEADS),
    ("num_heads", 2**40, HEADS),
    ("kv_num_heads", 0, HEADS),
    ("scale", 1, "type don.t match"),
)
def test_damage_of_attention_is_refused(name, value, reason):
    attention = ATTENTIONS["rotated"]
    with pytest.raises(Exception, match=reason):
        attend(attention, range(3), 3, attention.buffers(9), **{name: value})


def test_attention_that_refuses_a_pass_is_one_line():
    attention = ATTENTIONS["rotated"]
    feeds = attention.feeds(range(3), 3, attention.buffers(9))
    feeds["positions"] = np.array([[0, 1, 80]])
    opened = attention.session(feeds)
    io = opened.io_binding()
    for name, array in feeds.items():
        io.bind_cpu_input(name, array)
    for output in opened.get_outputs():
        io.bind_output(output.name)
    with pytest.raises(ContractError, match=r"position 80 has no row.*; export the b"):
        run_bound(opened, io)


class Case:
    """An operator over `TEXT_ROWS` rows of text; arrays of three axes are rows."""

    def __init__(self, function, name, rows, same, states, others):
        self.function, self.states = function, states
        self.before, self.behind = [*rows, *same], others
        values = self.inputs(slice(0, 1), states, (0, 1))
        kinds = {n: helper.np_dtype_to_tensor_dtype(x.dtype) for n, x in values.items()}
        made = ["y", *(f"state{i}" for i in range(len(states)))]
        how = {"domain": DOMAIN, "layout": LAYOUT_VERSION}
        node = helper.make_node(name, [*values], made, **how)
        inputs, outputs = (
            [helper.make_tensor_value_info(*pair, None) for pair in pairs.items()]
            for pairs in (kinds, dict.fromkeys(made, TensorProto.FLOAT))
        )
        graph = helper.make_graph([node], name, inputs, outputs)
        self.sessions = {count: operators.session_of(graph, count) for count in (1, 3)}

    def inputs(self, some, states, counts):
        before, behind = (
            [x[:, some] if x.ndim == 3 else x for x in part]
            for part in (self.before, self.behind)
        )
        values = [*before, *states, np.array(counts), *behind]
        return {f"x{i}": np.ascontiguousarray(x) for i, x in enumerate(values)}

    def compute(self, inputs, threads):
        """Answers and new states, by torch if `threads` is 0."""
        if threads:
            return self.sessions[threads].run(None, inputs)
        found = self.function(*map(torch.from_numpy, inputs.values()))
        return [x.numpy() for x in found]

    def run(self, passes, threads=1):
        """Answers of all rows; a pass has `width` rows, the first `right` are right."""
        states, answers, start, kept = self.states, [], 0, 0
        for width, right in passes:
            inputs = self.inputs(slice(start, start + width), states, (kept, width))
            answer, *states = self.compute(inputs, threads)
            answers.append(answer[:, :right])
            start, kept = start + right, right if width <= WIDEST else 0
        return np.concatenate(answers, 1)


def delta_rule(heads, key_heads, key, value, gates):
    random = np.random.default_rng(0)
    widths = heads * value, key_heads * key, key_heads * key
    rows = [random.standard_normal((1, TEXT_ROWS, w), "f4") / 3 for w in widths]
    decay, beta = random.uniform(0, 1, (2, 1, TEXT_ROWS, heads)).astype("f4")
    state = random.standard_normal((1, heads, key, value), "f4")
    kept = np.zeros((1, WIDEST, sum(widths[:2]) + gates * heads), "f4")
    how = [*rows, -decay], [], [state, kept], [beta] if gates == 2 else []
    return Case(linear_attention, "LinearAttention", *how)


def convolution(channels, size, has_bias):
    random = np.random.default_rng(0)
    rows, weights, bias = (
        random.standard_normal(shape, "f4")
        for shape in ((1, TEXT_ROWS, channels), (size, channels), channels)
    )
    state = random.standard_normal((1, size - 1 + WIDEST, channels), "f4")
    how = [rows], [weights], [state], [bias] if has_bias else []
    return Case(causal_convolution, "CausalConvolution", *how)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def test_rows_are_close_to_torch(case):
    for passes in (BY_ROW, *WAYS.values()):
        found, expected = case.run(passes), case.run(passes, threads=0)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_passes_or_threads(case, way, threads):
    assert sum(right for _, right in WAYS[way]) == TEXT_ROWS
    found = case.run(WAYS[way], threads=threads)
    np.testing.assert_array_equal(found, case.run(BY_ROW))


@pytest.mark.parametrize("counts", [(17, 1), (-1, 1), (0, 4), (0, -1)])
def test_rows_that_do_not_fit_are_refused(case, counts):
    inputs = case.inputs(slice(0, 3), case.states, counts)
    said = r"state_rows are -?\d+ and -?\d+, in a pass of 3"
    with pytest.raises(Exception, match=said):
        case.compute(inputs, 1)


def test_each_input_has_its_shape(case):
    inputs = case.inputs(slice(0, 3), case.states, (0, 3))
    case.compute(inputs, 1)
    for name, value in inputs.items():
        with pytest.raises(Exception, match=r"than its|another shape than"):
            case.compute({**inputs, name: value[..., :-1]}, 1)
