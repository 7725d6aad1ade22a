import numpy as np
import pytest

from jetdraft.contracts.step_contract import StepContract
from jetdraft.ort import ort
from jetdraft.runtime.passes.buffers import Cache

TOKENS = np.random.default_rng(3).integers(0, 288, 64)


@pytest.fixture
def graph(model):
    model.parts.target.cache.rewind(0)
    yield model.parts.target
    model.parts.target.cache.rewind(0)


def feed(graph, tokens):
    answer = graph.run(np.asarray(tokens))
    graph.cache.advance(len(tokens))
    return answer.logits.copy()


def contents(graph, rows):
    return [b.numpy()[:, :, :rows].copy() for b in graph.cache.buffers.values()]


@pytest.mark.parametrize("wrong", [1, 2, 5, 9])
def test_buffers_after_a_rewind_equal_a_fresh_prefill(graph, wrong):
    feed(graph, TOKENS[:20])
    feed(graph, (TOKENS[20 : 20 + wrong] + 1) % 288)
    graph.cache.rewind(20)
    feed(graph, TOKENS[20:30])
    rewound = contents(graph, 30)
    graph.cache.rewind(0)
    feed(graph, TOKENS[:20])
    feed(graph, TOKENS[20:30])
    for before, after in zip(rewound, contents(graph, 30), strict=True):
        assert np.array_equal(before, after)


def test_a_pass_writes_its_rows_and_no_others(graph):
    feed(graph, TOKENS[:10])
    before = contents(graph, graph.cache.capacity)
    graph.run(TOKENS[50:53])  # tokens that no test fed at this place
    for old, new in zip(before, contents(graph, graph.cache.capacity), strict=True):
        assert np.flatnonzero((old != new).any(axis=(0, 1, 3))).tolist() == [10, 11, 12]


def test_a_pass_past_the_buffer_is_refused(graph):
    graph.cache.advance(graph.cache.capacity - 2)
    with pytest.raises(ValueError, match="does not fit"):
        graph.run(TOKENS[:3])


def test_candidates_are_the_best_logits(graph):
    answer = graph.run(TOKENS[:6])
    order = np.argsort(-answer.logits, axis=1, kind="stable")[:, :64]
    best = np.take_along_axis(answer.logits, order, 1)
    assert np.array_equal(answer.candidate_logits, best)
    chosen = np.take_along_axis(answer.logits, answer.candidates, 1)
    assert np.array_equal(answer.candidate_logits, chosen)
    expected = np.log(np.exp(answer.logits.astype(np.float64)).sum(1))
    assert np.allclose(answer.logsumexp, expected, atol=1e-5)


def test_each_width_is_bound_once(graph):
    graph.run(TOKENS[:3])
    bound = dict(graph._bindings)
    graph.run(TOKENS[3:6])
    assert graph._bindings == bound


def test_answering_for_the_last_row_only(graph):
    whole = graph.run(TOKENS[:9])
    last = graph.run(TOKENS[:9], last_only=True)
    assert last.logits.shape == (1, 288)
    assert np.allclose(last.logits[0], whole.logits[-1], atol=0.05)
    assert last.candidates[0, 0] == whole.candidates[-1, 0]


def test_present_and_past_are_one_buffer(graph):
    buffer = next(iter(graph.cache.buffers.values()))
    assert isinstance(buffer, ort.OrtValue)
    before = buffer.numpy()[0, :, :4].copy()
    graph.run(TOKENS[40:44])
    assert not np.array_equal(before, buffer.numpy()[0, :, :4])


CONTRACT = StepContract(
    vocab_size=8, capacity=10, max_width=4, dtype="float32", kv_shapes=((2, 4),)
)


def test_cursor_moves_and_buffers_stay():
    cache = Cache(CONTRACT)
    pointers = [buffer.data_ptr() for buffer in cache.buffers.values()]
    cache.advance(7)
    cache.rewind(3)
    assert (cache.length, cache.room) == (3, 7)
    assert [buffer.data_ptr() for buffer in cache.buffers.values()] == pointers


@pytest.mark.parametrize("rows", [-1, 11])
def test_advance_never_passes_the_capacity(rows):
    with pytest.raises(ValueError, match="cannot commit"):
        Cache(CONTRACT).advance(rows)


@pytest.mark.parametrize("length", [-1, 5])
def test_rewind_never_goes_forward(length):
    cache = Cache(CONTRACT)
    cache.advance(4)
    with pytest.raises(ValueError, match="cannot rewind"):
        cache.rewind(length)
