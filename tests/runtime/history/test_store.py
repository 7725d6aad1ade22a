"""Earlier responses: kept for one user, bounded, and never in the way."""

import sqlite3
import time
from contextlib import closing
from unittest.mock import Mock

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import OptionError, StoreError
from jetdraft.runtime.history import store as stores
from jetdraft.runtime.history.store import MAX_TOKENS, MAX_USERS, Entry, ResponseStore

NOWHERE = np.zeros(0, np.float32)


def open_store(folder, **options):
    return ResponseStore(folder / "store.sqlite", "tokens", **options)


def entry(*prompt, response=(1, 2)):
    return Entry(list(prompt), list(response), NOWHERE)


def prompts(store):
    return [entry.prompt for entry in store.entries]


def changed(store, query):
    with closing(sqlite3.connect(store.file)) as database, database:
        return database.execute(query).fetchall()


def test_entries_come_back_latest_first(tmp_path):
    store = open_store(tmp_path)
    vector = np.array([0.6, 0.8], np.float32)
    store.add(Entry([5, 70000], [9], vector))
    store.add(entry(6))
    assert prompts(open_store(tmp_path)) == [[6], [5, 70000]]
    again = open_store(tmp_path).entries[1]
    assert (again.response, again.vector.tolist()) == ([9], vector.tolist())


def test_users_do_not_see_each_other(tmp_path):
    open_store(tmp_path, user="ann").add(entry(5))
    bob = open_store(tmp_path, user="bob")
    assert bob.entries == []
    bob.add(entry(6))
    assert bob.clear() == 1
    assert prompts(open_store(tmp_path, user="ann")) == [[5]]


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


def test_another_user_of_a_file_that_is_damaged_meanwhile(tmp_path):
    store = open_store(tmp_path)
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


def test_an_addition_reads_nothing_that_is_known(tmp_path, monkeypatch):
    """A model is busy until its response is kept."""
    store, others = open_store(tmp_path), open_store(tmp_path)
    for token in range(20):
        others.add(entry(token))
    read, make = [], stores._parse_entry
    monkeypatch.setattr(
        stores, "_parse_entry", lambda *row: (read.append(row), make(*row))[1]
    )
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
def test_very_long_and_empty_responses_are_not_kept(tmp_path, response):
    store = open_store(tmp_path)
    store.add(entry(5, response=response))
    assert store.entries == []


def test_a_shorter_run_of_the_same_keeps_the_longer_response(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[1, 2, 3]))
    store.add(entry(6))
    store.add(entry(5, response=[1, 2]))
    assert [(e.prompt, e.response) for e in store.entries] == [
        ([5], [1, 2, 3]),
        ([6], [1, 2]),
    ]


def test_entries_that_nobody_could_draft_are_left_out(tmp_path):
    store = open_store(tmp_path)
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


def test_a_failure_while_keeping_stops_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    full = Mock(side_effect=sqlite3.OperationalError("database or disk is full"))
    monkeypatch.setattr(store, "_write_entry", full)
    with pytest.warns(UserWarning, match="could not be kept"):
        store.add(entry(5))


def test_a_response_that_is_a_text_is_replaced(tmp_path):
    store = open_store(tmp_path)
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
    wrong = np.random.default_rng(4).integers(0, 288, 80).tolist()
    remembering.parts.store.add(Entry(PROMPT, wrong, vector))
    plain = text(model, method="none", **way)
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


def test_an_unfinished_text_is_not_kept(remembering):
    stream = remembering.stream(token_ids=PROMPT)
    next(iter(stream))
    stream.close()
    assert remembering.parts.store.entries == []


def test_without_a_store_nothing_is_recalled(model):
    assert "recall" not in model.methods
    for method in ("recall", "draft,recall"):
        with pytest.raises(OptionError, match="--store") as refusal:
            text(model, method=method)
        assert refusal.value.field == "method"


def test_a_store_of_another_tokenizer(bundle, remembering, monkeypatch):
    monkeypatch.setattr(jetdraft.Bundle, "tokenizer_sha256", "another")
    with pytest.raises(StoreError, match="another tokenizer"):
        jetdraft.load(bundle, threads=1, store=remembering.parts.store.file)


@pytest.mark.parametrize("method", ["lookup", "cascade", "auto", "draft,lookup"])
def test_a_user_without_a_store(model, method):
    with pytest.raises(OptionError, match="user 'ann' needs a store") as refusal:
        text(model, method=method, drafting={"user": "ann"})
    assert refusal.value.field == "drafting"


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
