"""Trigram tables, the tree search over them, and what they propose."""

import tracemalloc
from collections import Counter, defaultdict

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.methods.trigram.method import TrigramProposer
from jetdraft.runtime.history import trigrams as trigram
from jetdraft.runtime.history.trigrams import (
    MAX_SUCCESSORS,
    MAX_WEIGHT,
    Counts,
    TreeSearch,
    Trigrams,
    puct,
)
from jetdraft.runtime.sampling.chooser import Chooser, Sampling


def documents(seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 6, size).tolist() for size in (200, 90, 3, 2, 1, 0)]


def by_hand(texts):
    seen = defaultdict(Counter)
    for text in texts:
        for one, two, three in zip(text, text[1:], text[2:], strict=False):
            seen[one, two][three] += 1
    return seen


def test_shares_are_those_of_the_corpus():
    counts, expected = Counts.of(documents()), by_hand(documents())
    assert len(counts.pairs) == len(expected)
    for pair, after in expected.items():
        shares = {token: times / after.total() for token, times in after.items()}
        assert counts.successors(*pair) == pytest.approx(shares)


def test_only_the_most_frequent_successors_are_kept():
    text = [t for c in range(30) for _ in range(1 + c % 20) for t in (900, 901, c)]
    kept = Counts.of([text]).successors(900, 901)
    assert len(kept) == MAX_SUCCESSORS
    assert {18, 19} <= set(kept)
    assert 0 not in kept


def test_large_ids_keep_apart():
    counts = Counts.of([[2**31, 5, 7], [5, 2**31, 8]])
    assert counts.successors(2**31, 5) == {7: 1.0}
    assert counts.successors(5, 2**31) == {8: 1.0}
    assert counts.successors(5, 5) == {}


def test_a_table_comes_back_from_its_file(tmp_path):
    counts = Counts.of(documents())
    counts.save(tmp_path / "table.npz", "tokens")
    again = Counts.load(tmp_path / "table.npz", "tokens", 300)
    for name, array in vars(counts).items():
        assert np.array_equal(getattr(again, name), array)
        assert getattr(again, name).dtype == array.dtype


def test_bad_tables_are_refused(tmp_path):
    other, broken = tmp_path / "other.npz", tmp_path / "broken.npz"
    Counts.of(documents()).save(other, "other")
    broken.write_bytes(b"no table")
    for file, words in (
        (other, "another tokenizer"),
        (broken, "cannot read a table"),
        (tmp_path / "missing.npz", "cannot read a table"),
    ):
        with pytest.raises(StoreError, match=words):
            Counts.load(file, "tokens", 300)


@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, lambda a: a[:3]) for name in ("pairs", "offsets", "tokens", "weights")),
     *((name, lambda a: a[::-1]) for name in ("pairs", "offsets")),
     *((name, lambda a: a * 0) for name in ("pairs", "offsets", "weights")),
     ("pairs", lambda a: a.astype(np.float64)),
     ("tokens", lambda a: a + np.uint32(300)), ("weights", lambda a: a * np.nan)],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(tmp_path, name, damage):
    file = tmp_path / "table.npz"
    Counts.of(documents()).save(file, "tokens")
    arrays = dict(np.load(file))
    np.savez(file, **{**arrays, name: damage(arrays[name])})
    with pytest.raises(StoreError, match="cannot read a table"):
        Counts.load(file, "tokens", 300)


def test_decoding_adds_to_the_table(monkeypatch):
    trigrams = Trigrams(Counts.of([[1, 2, 3], [1, 2, 4]]))
    trigrams.learn([1, 2, 4])
    assert trigrams.successors(1, 2) == pytest.approx({3: 0.5, 4: 0.54})
    for _ in range(100):
        trigrams.learn([1, 2, 4])
    assert trigrams.successors(1, 2)[4] == MAX_WEIGHT
    monkeypatch.setattr(trigram, "MAX_LEARNED", 2)
    trigrams.learn([7, 8, 9])
    trigrams.learn([8, 8, 9])
    assert trigrams.successors(1, 2) == pytest.approx({3: 0.5, 4: 0.5})


def test_what_decoding_learns_takes_little_memory():
    """Each model has a table, and each user of a store: 64 of them are 250 MB."""
    tokens = np.random.default_rng(3).integers(0, 60_000, 20_000).tolist()
    trigrams = Trigrams()
    tracemalloc.start()
    try:
        for end in range(16, len(tokens), 13):
            trigrams.learn(tokens[end - 16 : end])
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 1e6 < taken < 5e6


def test_the_golden_value_of_the_search():
    assert puct(3.2, 2, 10, 0.25) == pytest.approx(10.260687, abs=1e-6)
    assert puct(0.0, 0, 10, 0.25) == float("inf")


TABLE = {(1, 2): {3: 0.7, 4: 0.3}, (2, 3): {5: 1.0}, (2, 4): {6: 1.0}}


def test_a_search_finds_the_likely_tree_and_repeats_it():
    search = TreeSearch(lambda one, two: TABLE.get((one, two), {}))
    tokens, parents = search.run(1, 2, budget=4)
    assert sorted(tokens) == [3, 4, 5, 6]
    assert {
        (token, ([2, *tokens])[p]) for token, p in zip(tokens, parents, strict=True)
    } == {(3, 2), (4, 2), (5, 3), (6, 4)}
    assert tokens[0] == 3
    assert search.run(1, 2, budget=4) == (tokens, parents)
    assert search.run(1, 2, budget=2)[0] == tokens[:2]
    assert search.run(9, 9, budget=2) == ([], [])


def test_a_rollout_scores_what_it_adds():
    """After 3 the sure 5 follows, and nothing after it: 1 and its share are added."""
    search = TreeSearch(lambda one, two: TABLE.get((one, two), {}), iterations=1)
    search.run(1, 2, budget=1)
    first = search._nodes[1]
    assert (first.token, first.visits) == (3, 1)
    assert first.score == pytest.approx(1.0 + 0.7 + 1.0)


def test_drafts_follow_the_likeliest_successor():
    proposer = TrigramProposer(Trigrams(Counts.of([[1, 2, 3, 4, 5], [1, 2, 3]])))
    proposer.begin([1, 2], Chooser(Sampling()))
    assert proposer.propose([1, 2], 3).tokens == [2, 3, 4, 5]
    assert proposer.propose([9], 3).tokens == [9]
    assert proposer.propose([1, 2], 3, parents=[0, 1, 0]).tokens == [2, 3, 4, 5]
    # A repeated text is learned.
    proposer = TrigramProposer(Trigrams())
    text = [5, 9, 7, 3, 8, 6] * 3
    proposer.begin(text, Chooser(Sampling()))
    assert proposer.propose(text, 4).tokens[1:] == [5, 9, 7, 3]


class Counted(list):
    """A prompt that counts the tokens that are copied out of it."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            Counted.copied += len(found)
        return found


def test_a_long_prompt_is_read_in_linear_time():
    """It is learned in windows, and not in all of its beginnings."""
    prompt = Counted(range(5000))
    Counted.copied = 0
    trigrams = Trigrams()
    TrigramProposer(trigrams).begin(prompt, Chooser(Sampling()))
    assert Counted.copied < 2 * len(prompt)
    assert all({*trigrams.successors(t, t + 1)} == {t + 2} for t in range(4980))
