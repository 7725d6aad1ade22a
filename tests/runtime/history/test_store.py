import sqlite3
import time
import tracemalloc
from collections import Counter, defaultdict
from contextlib import closing

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import StoreError
from jetdraft.methods.trigram import method as trigram
from jetdraft.methods.trigram.method import (
    MAX_SUCCESSORS,
    MAX_WEIGHT,
    Counts,
    TreeSearch,
    TrigramProposer,
    Trigrams,
)
from jetdraft.runtime.history import store as stores
from jetdraft.runtime.history.store import MAX_TOKENS, MAX_USERS, Entry, ResponseStore
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests import cases
from tests.programs import refused_option

NOWHERE = np.zeros(0, np.float32)


def open_store(folder, **options):
    return ResponseStore(folder / "store.sqlite", "tokens", **options)


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def entry(*prompt, response=(1, 2)):
    return Entry(list(prompt), list(response), NOWHERE)


def prompts(store):
    return [entry.prompt for entry in store.entries]


def changed(store, query):
    with closing(sqlite3.connect(store.file)) as database, database:
        return database.execute(query).fetchall()


def test_entries_come_back_latest_first(store, tmp_path):
    vector = np.array([0.6, 0.8], np.float32)
    store.add(Entry([5, 70000], [9], vector))
    store.add(entry(6))
    assert prompts(open_store(tmp_path)) == [[6], [5, 70000]]
    again = open_store(tmp_path).entries[1]
    assert (again.response, again.vector.tolist()) == ([9], vector.tolist())


def test_one_file_serves_several_users(tmp_path):
    store = open_store(tmp_path, most_entries=2)
    ann = store.of("ann")
    ann.add(entry(5))
    store.add(entry(6))
    assert (prompts(store), prompts(ann)) == ([[6]], [[5]])
    assert ann.of("") is store
    assert store.of("ann") is ann, "who drafts sees what was added"
    assert prompts(open_store(tmp_path, user="bob").of("ann")) == [[5]]
    for token in range(3):
        ann.add(entry(token))
    assert prompts(ann) == [[2], [1]]
    with pytest.raises(StoreError, match="unprintable"):
        store.of("\udcff")
    for number in range(MAX_USERS):
        store.of(f"user {number}")
    assert store.of("ann") is not ann, "memory is bounded"
    assert prompts(store.of("ann")) == [[2], [1]]


def test_another_user_of_a_file_that_is_damaged_meanwhile(store):
    for token in range(50):
        store.add(entry(token, response=range(500)))
    content = bytearray(store.file.read_bytes())
    content[4096:8096] = b"x" * 4000
    store.file.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        assert store.of("ann").entries == []


def test_the_same_request_is_kept_once_and_the_oldest_go(tmp_path):
    store = open_store(tmp_path, most_entries=3)
    store.add(entry(5, response=[1]))
    store.add(entry(5, response=[2]))
    assert [entry.response for entry in store.entries] == [[2]]
    for token in range(6):
        store.add(entry(token))
    assert prompts(store) == [[5], [4], [3]]


def test_an_addition_reads_nothing_that_is_known(store, tmp_path, monkeypatch):
    """A model is busy until its response is kept."""
    others = open_store(tmp_path)
    for token in range(20):
        others.add(entry(token))
    read, make = [], stores.Entry
    monkeypatch.setattr(stores, "Entry", lambda *row: read.append(row) or make(*row))
    store.add(entry(20))
    assert prompts(store) == [[token] for token in range(20, -1, -1)]
    read.clear()
    store.add(entry(7))
    assert prompts(store)[:3] == [[7], [20], [19]]
    assert len(store.entries) == 21
    assert len(read) == 1, "the others were read before"


def test_what_is_too_old_goes(tmp_path, monkeypatch):
    store = open_store(tmp_path, most_days=2)
    store.add(entry(5))
    open_store(tmp_path, user="bob").add(entry(5))
    later = time.time() + 3 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert prompts(open_store(tmp_path, most_days=2)) == []
    store.add(entry(6))
    assert changed(store, "select count(*) from entries") == [(1,)], "bob's too"


@pytest.mark.parametrize("response", [range(MAX_TOKENS), []])
def test_very_long_and_empty_responses_are_not_kept(store, response):
    store.add(entry(5, response=response))
    assert store.entries == []


def test_a_shorter_run_of_the_same_keeps_the_longer_response(store):
    store.add(entry(5, response=[1, 2, 3]))
    store.add(entry(6))
    store.add(entry(5, response=[1, 2]))
    assert [(e.prompt, e.response) for e in store.entries] == [
        ([5], [1, 2, 3]),
        ([6], [1, 2]),
    ]


def test_entries_that_nobody_could_draft_are_left_out(store, tmp_path):
    store.add(entry(5, response=[7, 300]))
    store.add(entry(6, response=[7]))
    assert prompts(open_store(tmp_path, vocab_size=300)) == [[6]]
    changed(store, "update entries set response = x'010203'")
    assert open_store(tmp_path).entries == []


def test_a_user_must_be_a_name_and_the_file_in_a_folder(tmp_path):
    with pytest.raises(StoreError, match="unprintable"):
        open_store(tmp_path, user="\udcff")
    with pytest.raises(StoreError, match="cannot write"):
        open_store(tmp_path / "missing")


def test_a_response_that_is_a_text_is_replaced(store, tmp_path):
    store.add(entry(5))
    changed(store, "update entries set response = 'hello'")
    again = open_store(tmp_path)
    assert again.entries == []
    again.add(entry(5, response=[7]))
    assert [entry.response for entry in again.entries] == [[7]]


PROMPT = np.random.default_rng(3).integers(0, 288, 24).tolist()
WAYS = [{}, {"temperature": 0.9, "seed": 2}]


@pytest.fixture
def remembering(bundle, tmp_path):
    return jetdraft.load(bundle, threads=1, store=tmp_path / "store.sqlite")


def text(model, prompt=PROMPT, **options):
    return model.generate(
        token_ids=prompt, max_new_tokens=60, ignore_eos=True, **options
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_second_time_takes_few_passes(remembering, model, way):
    plain = text(model, method="none", **way)
    assert text(remembering, method="recall", **way).token_ids == plain.token_ids
    again = text(remembering, method="recall", num_draft_tokens=15, **way)
    assert again.token_ids == plain.token_ids
    assert again.stats.tokens_per_pass == pytest.approx(15.0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("method", ["recall", "lookup", "recall,lookup", "auto"])
def test_a_poisoned_entry_changes_no_text(remembering, model, method, way):
    vector = remembering.parts.similarity.vector(PROMPT)
    plain = text(model, method="none", **way)
    wrong = np.random.default_rng(4).integers(0, 288, 80).tolist()
    wrong = [*plain.token_ids[:3], *wrong]
    remembering.parts.store.add(Entry(PROMPT, wrong, vector))
    poisoned = text(remembering, method=method, **way)
    assert poisoned.token_ids == plain.token_ids
    if method == "recall":
        assert poisoned.stats.drafted_tokens > poisoned.stats.accepted_tokens


def test_what_is_said_is_kept_for_the_next_process(bundle, remembering):
    first = text(remembering)
    again = jetdraft.load(bundle, threads=1, store=remembering.parts.store.file)
    [entry] = again.parts.store.entries
    assert (entry.prompt, entry.response) == (PROMPT, first.token_ids)
    assert text(again, method="lookup", num_draft_tokens=8).stats.tokens_per_pass > 4


def test_a_saved_prefix_and_an_unfinished_text_are_not_kept(remembering, tmp_path):
    remembering.save_prefix(tmp_path / "prefix.npz", PROMPT)
    assert remembering.parts.store.entries == []
    stream = remembering.stream(token_ids=PROMPT)
    next(iter(stream))
    stream.close()
    assert remembering.parts.store.entries == []


def test_without_a_store_nothing_is_recalled(model):
    assert "recall" not in model.methods
    for method in ("recall", "draft,recall"):
        with refused_option("--store", "method"):
            text(model, method=method)


def test_a_store_of_another_tokenizer(bundle, remembering, monkeypatch):
    monkeypatch.setattr(jetdraft.Bundle, "tokenizer_sha256", "another")
    with pytest.raises(StoreError, match="another tokenizer"):
        jetdraft.load(bundle, threads=1, store=remembering.parts.store.file)


@pytest.mark.parametrize("method", ["lookup", "cascade", "auto", "draft,lookup"])
def test_a_user_without_a_store(model, method):
    with refused_option("user 'ann' needs a store"):
        text(model, method=method, drafting={"user": "ann"})


@pytest.mark.parametrize("method", ["recall", "lookup", "auto"])
def test_what_a_user_asked_is_drafted_for_that_user_only(remembering, method):
    store, ann = remembering.parts.store, {"drafting": {"user": "ann"}}
    first = text(remembering, method=method, **ann)
    assert store.entries == store.of("bob").entries == []
    [entry] = store.of("ann").entries
    assert (entry.prompt, entry.response) == (PROMPT, first.token_ids)
    if method != "auto":
        again = text(remembering, method=method, num_draft_tokens=8, **ann)
        assert again.stats.tokens_per_pass > 4
        bob = {"drafting": {"user": "bob"}}
        other = text(remembering, method=method, num_draft_tokens=8, **bob)
        assert other.stats.tokens_per_pass < 2
        assert again.token_ids == other.token_ids == first.token_ids


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


@cases(
    "name, damage",
    *((name, lambda a: a[:3]) for name in ("pairs", "offsets", "tokens", "weights")),
    *((name, lambda a: a[::-1]) for name in ("pairs", "offsets")),
    *((name, lambda a: a * 0) for name in ("pairs", "offsets", "weights")),
    ("pairs", lambda a: a.astype(np.float64)),
    ("tokens", lambda a: a + np.uint32(300)),
    ("weights", lambda a: a * np.nan),
)
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
    assert trigram.puct(3.2, 2, 10, 0.25) == pytest.approx(10.260687, abs=1e-6)
    assert trigram.puct(0.0, 0, 10, 0.25) == float("inf")


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
    proposer = TrigramProposer(Trigrams())
    text = [5, 9, 7, 3, 8, 6] * 3
    proposer.begin(text, Chooser(Sampling()))
    assert proposer.propose(text, 4).tokens[1:] == [5, 9, 7, 3]


class Counted(list):
    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            Counted.copied += len(found)
        return found


def test_a_long_prompt_is_read_in_linear_time():
    prompt = Counted(range(5000))
    Counted.copied = 0
    trigrams = Trigrams()
    TrigramProposer(trigrams).begin(prompt, Chooser(Sampling()))
    assert Counted.copied < 2 * len(prompt)
    assert all({*trigrams.successors(t, t + 1)} == {t + 2} for t in range(4980))
