"""The operators of recurrent states compute what torch does, in passes of any rows."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from jetdraft.checkpoints.recurrence import causal_convolution, linear_attention
from jetdraft.contracts.constants import WIDEST
from jetdraft.native import DOMAIN
from jetdraft.quant.grids import LAYOUT_VERSION
from tests.native.operators import session_of

ROWS = 40


class Case:
    """An operator over a text of `ROWS` rows: `rows`, and what all passes share.

    Arrays with three axes in `others` are rows too.
    """

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
        self.sessions = {count: session_of(graph, count) for count in (1, 3)}

    def inputs(self, some, states, counts):
        """What the operator reads in a pass over `some` rows, by name."""
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


def attention(heads, key_heads, key, value, gates):
    random = np.random.default_rng(0)
    widths = heads * value, key_heads * key, key_heads * key
    rows = [random.standard_normal((1, ROWS, w), "f4") / 3 for w in widths]
    decay, beta = random.uniform(0, 1, (2, 1, ROWS, heads)).astype("f4")
    state = random.standard_normal((1, heads, key, value), "f4")
    kept = np.zeros((1, WIDEST, sum(widths[:2]) + gates * heads), "f4")
    others = [beta] if gates == 2 else []
    name = "LinearAttention"
    return Case(linear_attention, name, [*rows, -decay], [], [state, kept], others)


def convolution(channels, size, has_bias):
    random = np.random.default_rng(0)
    rows, weights, bias = (
        random.standard_normal(shape, "f4")
        for shape in ((1, ROWS, channels), (size, channels), channels)
    )
    state = random.standard_normal((1, size - 1 + WIDEST, channels), "f4")
    others = [bias] if has_bias else []
    name = "CausalConvolution"
    return Case(causal_convolution, name, [rows], [weights], [state], others)


CASES = {
    "delta": lambda: attention(3, 3, 128, 128, 2),
    "mamba": lambda: attention(4, 2, 16, 83, 1),
    "tiny": lambda: attention(2, 1, 8, 4, 2),
    "window of 4": lambda: convolution(6144, 4, has_bias=False),
    "window of 3": lambda: convolution(7, 3, has_bias=True),
}
BY_ROW = [(1, 1)] * ROWS
OUTCOMES = [(16, n) for n in (1, 16, 7)] + [(4, 1), (4, 4), (3, 0), (3, 3), (1, 1)]
WAYS = {
    "in part": [*OUTCOMES, *[(1, 1)] * 7],
    "a wide pass first": [(20, 20), (2, 1), (19, 19)],
    "a wide pass after kept rows": [(5, 3), (17, 17), (4, 4), (1, 1), (15, 15)],
}


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
    assert sum(right for _, right in WAYS[way]) == ROWS
    found = case.run(WAYS[way], threads=threads)
    np.testing.assert_array_equal(found, case.run(BY_ROW))


@pytest.mark.parametrize("counts", [(17, 1), (-1, 1), (0, 4), (0, -1)])
def test_rows_that_do_not_fit_are_refused(case, counts):
    inputs = case.inputs(slice(0, 3), case.states, counts)
    with pytest.raises(
        Exception, match=r"state_rows are -?\d+ and -?\d+, in a pass of 3"
    ):
        case.compute(inputs, 1)


def test_each_input_has_its_shape(case):
    inputs = case.inputs(slice(0, 3), case.states, (0, 3))
    case.compute(inputs, 1)
    for name, value in inputs.items():
        with pytest.raises(Exception, match=r"than its|another shape than"):
            case.compute({**inputs, name: value[..., :-1]}, 1)
