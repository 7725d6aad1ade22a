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
    """An operator with rows to read, its states, and what it reads behind these."""

    def __init__(self, function, rows, states, last=(), constants=()):
        self.function, self.rows, self.last = function, rows, last
        self.constants, self.states = constants, states
        name = "".join(map(str.capitalize, function.__name__.split("_")))
        firsts = [*self.pass_over(0, 1), *constants, *states, np.zeros(2, np.int64)]
        firsts += last if constants else self.gates_of(0, 1)
        names = [f"x{i}" for i in range(len(firsts))]
        made = ["y", *(f"state{i}" for i in range(len(states)))]
        node = helper.make_node(name, names, made, domain=DOMAIN, layout=LAYOUT_VERSION)
        inputs, outputs = (
            [helper.make_tensor_value_info(*pair, None) for pair in pairs.items()]
            for pairs in (
                {
                    n: helper.np_dtype_to_tensor_dtype(x.dtype)
                    for n, x in zip(names, firsts, strict=True)
                },
                dict.fromkeys(made, TensorProto.FLOAT),
            )
        )
        graph = helper.make_graph([node], name, inputs, outputs)
        self.sessions = [session_of(graph, threads) for threads in (1, 3)]

    def pass_over(self, start, end):
        return [x[:, start:end] for x in self.rows]

    def gates_of(self, start, end):
        return [x[:, start:end] for x in self.last]

    def run(self, widths, *, by_torch=False, threads=0):
        """Answers of all rows; each pass has `width` rows, of which some are right."""
        states, answers, start, kept = [*self.states], [], 0, 0
        for width, right in widths:
            rows = [*self.pass_over(start, start + width), *self.constants]
            others = (
                self.last if self.constants else self.gates_of(start, start + width)
            )
            counts = np.array([kept, width])
            values = [
                np.ascontiguousarray(x) for x in (*rows, *states, counts, *others)
            ]
            if by_torch:
                found = self.function(*map(torch.from_numpy, values))
                answer, *states = (x.numpy() for x in found)
            else:
                feeds = {f"x{i}": x for i, x in enumerate(values)}
                answer, *states = self.sessions[threads].run(None, feeds)
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
    return Case(linear_attention, [*rows, -decay], [state, kept], others)


def convolution(channels, size, has_bias):
    random = np.random.default_rng(0)
    rows, weights, bias = (
        random.standard_normal(shape, "f4")
        for shape in ((1, ROWS, channels), (size, channels), channels)
    )
    state = random.standard_normal((1, size - 1 + WIDEST, channels), "f4")
    last = [bias] if has_bias else []
    return Case(causal_convolution, [rows], [state], last, [weights])


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
        found, expected = case.run(passes), case.run(passes, by_torch=True)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [0, 1])
def test_no_bit_depends_on_passes_or_threads(case, way, threads):
    assert sum(right for _, right in WAYS[way]) == ROWS
    found = case.run(WAYS[way], threads=threads)
    np.testing.assert_array_equal(found, case.run(BY_ROW))


@pytest.mark.parametrize("counts", [(17, 1), (-1, 1), (0, 4), (0, -1)])
def test_rows_that_do_not_fit_are_refused(case, counts):
    values = [*case.pass_over(0, 3), *case.constants, *case.states, np.array(counts)]
    values += case.last if case.constants else case.gates_of(0, 3)
    feeds = {f"x{i}": np.ascontiguousarray(x) for i, x in enumerate(values)}
    with pytest.raises(Exception, match="state_rows are"):
        case.sessions[0].run(None, feeds)
    for name in feeds.keys() - {f"x{len(case.rows) + len(case.constants)}"}:
        cut = {**feeds, name: feeds[name][..., :-1]}
        if name in ("x0", "x1") or feeds[name].ndim > 1:
            with pytest.raises(Exception, match=r"than its|another shape|Invalid"):
                case.sessions[0].run(None, cut)
