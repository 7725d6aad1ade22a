"""Attention computes what onnxruntime's does, with a row's bits the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from jetdraft.contracts.constants import HIDDEN
from tests.native.operators import Attending, attention_session

ROTATED = {"do_rotary": 1}
CASES = {
    "plain": Attending(packed=False),
    "rotated": Attending(**ROTATED),
    "interleaved": Attending(3, 1, 32, **ROTATED, rotary_interleaved=1),
    "wide heads": Attending(6, 2, 128, **ROTATED),
    "a head of keys for each": Attending(3, 3, 16),
    "a size of no whole vector": Attending(3, 1, 20),
    "less than a vector": Attending(4, 2, 6, packed=False),
    "window": Attending(local_window_size=9, **ROTATED),
    "softcap": Attending(softcap=1.5),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(params=[1, 4])
def bias(request):
    """For all heads alike, or for each of four."""
    random = np.random.default_rng(1)
    return random.standard_normal((1, request.param, 80, 96), "f4")


def rotated(case, x):
    """Heads [heads, length, size], rotated by the row of each in the tables."""
    size, pairs = x.shape[-1], case.attributes["rotary_interleaved"]
    split = [slice(0, None, 2), slice(1, None, 2)]
    split = split if pairs else [slice(size // 2), slice(size // 2, None)]
    first, second = (x[..., part] for part in split)
    cosines, sines = case.tables["cosines"], case.tables["sines"]
    result = np.empty_like(x)
    result[..., split[0]] = first * cosines - second * sines
    result[..., split[1]] = second * cosines + first * sines
    return result


def attended(case, bias=0.0):
    """What the text's rows get [length, heads * size], in double precision."""
    numbers, length = case.attributes, case.length
    query, key, value = (
        part[0].reshape(length, -1, case.buffer[1]).transpose(1, 0, 2).astype(float)
        for part in case.parts
    )
    if numbers["do_rotary"]:
        query, key = rotated(case, query), rotated(case, key)
    key, value = (x.repeat(len(query) // len(x), axis=0) for x in (key, value))
    scores = query @ key.transpose(0, 2, 1) * numbers["scale"]
    if cap := numbers["softcap"]:
        scores = cap * np.tanh(scores / cap)
    distance = np.arange(length)[:, None] - np.arange(length)
    window = numbers["local_window_size"] or length
    scores += np.where((distance >= 0) & (distance < window), bias, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    answer = shares @ value / shares.sum(-1, keepdims=True)
    return answer.transpose(1, 0, 2).reshape(length, -1)


@pytest.mark.parametrize("width", [1, 7, 80])
def test_it_attends_to_the_rows_before(case, width):
    np.testing.assert_allclose(case.read(width), attended(case), atol=2e-6)


def test_it_is_close_to_onnxruntimes(case):
    if case.buffer[1] % 8:
        pytest.skip("onnxruntime's takes multiples of 8 only")
    window = case.attributes["local_window_size"] or -1
    options = {"domain": "com.microsoft", "local_window_size": window}
    expected = case.read(7, **options)
    np.testing.assert_allclose(case.read(7), expected, atol=2e-6)


def test_a_bias_is_added_to_the_scores(bias):
    expected = attended(CASES["rotated"], bias[0, :, :, :80].astype(float))
    found = CASES["rotated"].read(5, bias=bias)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_row_has_the_same_bits_in_every_pass(case):
    whole = case.read(80)
    for width in (*range(1, 17), 64):
        np.testing.assert_array_equal(case.read(width), whole)


def test_a_row_with_a_bias_has_the_same_bits_in_every_pass(bias):
    whole = CASES["plain"].read(80, bias=bias)
    for width in (1, 2, 9):
        np.testing.assert_array_equal(CASES["plain"].read(width, bias=bias), whole)


@pytest.mark.parametrize("width", [1, 3, 30])
@pytest.mark.parametrize("capacity", [80, 300])
def test_threads_and_the_length_of_buffers_change_no_bit(case, width, capacity):
    found = case.read(width, capacity, threads=2)
    np.testing.assert_array_equal(found, case.read(80))


@pytest.mark.parametrize("width", [1, 4, 83])
def test_hidden_slots_change_no_bit(width):
    """Rows beyond a gap of three slots, as in a pass with branches."""
    case, whole = CASES["rotated"], CASES["rotated"].read(80)
    rows = [*range(40), 7, 60, 3, *range(40, 80)]
    bias = np.zeros((1, 1, 83, 99), np.float32)
    bias[:, :, 43:, 40:43] = HIDDEN
    buffers, answers = case.buffers(99), []
    for start in range(0, 83, width):
        some = slice(start, start + width)
        feeds = case.feeds(rows[some], start, buffers, bias[:, :, some])
        session = attention_session(feeds, **case.attributes)
        answer, *buffers = session.run(None, feeds)
        answers += [*answer[0]]
    np.testing.assert_array_equal(np.delete(answers, [40, 41, 42], axis=0), whole)


def test_all_instructions_give_the_same_bits(case, monkeypatch):
    best = case.read(5)
    monkeypatch.setenv("JETDRAFT_ISA", "portable")
    np.testing.assert_array_equal(case.read(5), best)


def test_keys_and_values_lie_in_the_buffers():
    case = CASES["plain"]
    feeds = case.feeds(range(3), 2, case.buffers(9))
    _, *buffers = attention_session(feeds, **case.attributes).run(None, feeds)
    for buffer, rows in zip(buffers, case.parts[1:], strict=True):
        by_head = rows[0, :3].reshape(3, 2, 64).transpose(1, 0, 2)
        np.testing.assert_array_equal(buffer[0, :, 2:5], by_head)
        assert not buffer[0, :, [0, 1, 5, 6, 7, 8]].any()


def test_a_pass_may_have_no_rows():
    case = CASES["rotated"]
    feeds = case.feeds(range(0), 5, [b + 1 for b in case.buffers(9)])
    y, *buffers = attention_session(feeds, **case.attributes).run(None, feeds)
    assert y.shape == (1, 0, 256)
    assert all((buffer == 1).all() for buffer in buffers)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_not_finite_spoils_its_row_only(bad):
    case = Attending(packed=False)
    plain = case.read(80)
    case.parts[0][0, 40, :64] = bad
    found = case.read(80)
    assert np.isnan(found[40, :64]).all()
    others = np.delete(found, 40, axis=0)
    np.testing.assert_array_equal(others, np.delete(plain, 40, axis=0))


def floats(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"query": floats(1, 3, 500)}, "rows of another width"),
        ({"query": floats(3, 512)}, "rows of another width"),
        ({"query": floats(2, 3, 512)}, "rows of another width"),
        ({"key": floats(1, 3, 128)}, "rows of another width"),
        ({"past_key": floats(1, 2, 8, 64)}, "buffers of another shape"),
        ({"past_value": floats(1, 2, 9, 32)}, "buffers of another shape"),
        ({"past_key": floats(1, 2, 0, 64)}, "buffers of another shape"),
        ({"last_row": np.array([1], np.int32)}, "do not fit into the buffers"),
        ({"last_row": np.array([9], np.int32)}, "do not fit into the buffers"),
        ({"last_row": np.array([2**31 - 1], np.int32)}, "do not fit into the buffers"),
        ({"last_row": np.zeros(0, np.int32)}, "the index of its last row"),
        ({"last_row": np.array([5])}, "int64"),
        ({"cosines": floats(80, 31)}, "tables or positions of another shape"),
        ({"sines": floats(79, 32)}, "tables or positions of another shape"),
        ({"positions": np.array([[0, 1]])}, "tables or positions of another shape"),
        ({"positions": np.array([[0, -1, 2]])}, "position -1 has no row"),
        ({"positions": np.array([[0, 1, 80]])}, "position 80 has no row"),
        ({"bias": floats(1, 1, 3, 5)}, "a bias of another shape"),
        ({"bias": floats(1, 3, 3, 9)}, "a bias of another shape"),
        ({"num_heads": 3}, "numbers of heads"),
        ({"num_heads": 2**40}, "numbers of heads"),
        ({"kv_num_heads": 0}, "numbers of heads"),
        ({"num_heads": 8}, "rows of another width"),
        ({"do_rotary": None}, "do_rotary"),
    ],
)
def test_damage_is_refused(changed, reason):
    case = CASES["rotated"]
    feeds = case.feeds(range(3), 3, case.buffers(9))
    attributes = {**case.attributes}
    for name, value in changed.items():
        (attributes if name in attributes else feeds)[name] = value
    attributes = {n: v for n, v in attributes.items() if v is not None}
    with pytest.raises(Exception, match=reason):
        attention_session(feeds, **attributes).run(None, feeds)


def test_numbers_must_be_aligned():
    case = CASES["rotated"]
    feeds = case.feeds(range(3), 3, case.buffers(9))
    shifted = np.zeros(feeds["query"].nbytes + 1, np.uint8)[1:].view(np.float32)
    feeds["query"] = shifted.reshape(feeds["query"].shape)
    with pytest.raises(Exception, match="a multiple of its numbers' size"):
        attention_session(feeds, **case.attributes).run(None, feeds)
