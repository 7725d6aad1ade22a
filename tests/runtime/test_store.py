"""Earlier responses: kept for one user, bounded, and never in the way."""

import sqlite3
import stat
import time

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.runtime.store import MOST_TOKENS, Entry, ResponseStore

NOWHERE = np.zeros(0, np.float32)


def open_store(folder, **options):
    return ResponseStore(folder / "store.sqlite", "tokens", **options)


def entry(*prompt, response=(1, 2)):
    return Entry(list(prompt), list(response), NOWHERE)


def prompts(store):
    return [found.prompt for found in store.entries]


def test_entries_come_back_latest_first(tmp_path):
    store = open_store(tmp_path)
    vector = np.array([0.6, 0.8], np.float32)
    store.add(Entry([5, 70000], [9], vector))
    store.add(entry(6))
    assert prompts(open_store(tmp_path)) == [[6], [5, 70000]]
    again = open_store(tmp_path).entries[1]
    assert (again.response, again.vector.tolist()) == ([9], vector.tolist())


def test_only_its_owner_can_read_it(tmp_path):
    (tmp_path / "store.sqlite").touch(mode=0o644)
    open_store(tmp_path).add(entry(5))
    assert stat.S_IMODE((tmp_path / "store.sqlite").stat().st_mode) == 0o600


def test_users_do_not_see_each_other(tmp_path):
    open_store(tmp_path, user="ann").add(entry(5))
    bob = open_store(tmp_path, user="bob")
    assert bob.entries == []
    bob.add(entry(6))
    assert bob.clear() == 1
    assert prompts(open_store(tmp_path, user="ann")) == [[5]]


def test_the_same_request_is_kept_once(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[1]))
    store.add(entry(5, response=[2]))
    assert [found.response for found in store.entries] == [[2]]


def test_the_oldest_go(tmp_path):
    store = open_store(tmp_path, most_entries=3)
    for token in range(6):
        store.add(entry(token))
    assert prompts(store) == [[5], [4], [3]]


def test_what_is_too_old_goes(tmp_path, monkeypatch):
    store = open_store(tmp_path, most_days=2)
    store.add(entry(5))
    later = time.time() + 3 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    assert prompts(open_store(tmp_path, most_days=2)) == []
    store.add(entry(6))
    with sqlite3.connect(store.file) as database:
        assert database.execute("select count(*) from entries").fetchone() == (1,)


def test_very_long_ones_are_not_kept(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=range(MOST_TOKENS)))
    assert store.entries == []


def test_another_tokenizer_is_refused(tmp_path):
    open_store(tmp_path).add(entry(5))
    with pytest.raises(StoreError, match="another tokenizer"):
        ResponseStore(tmp_path / "store.sqlite", "other")
    assert prompts(open_store(tmp_path)) == [[5]]


@pytest.mark.parametrize("damage", ["header", "middle"])
def test_a_damaged_file_is_moved_aside(tmp_path, damage):
    store = open_store(tmp_path)
    for token in range(50):
        store.add(entry(token, response=range(500)))
    content = bytearray(store.file.read_bytes())
    at = 0 if damage == "header" else 4096
    content[at : at + 4000] = b"x" * 4000
    store.file.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        again = open_store(tmp_path)
    assert again.entries == []
    assert (tmp_path / "store.sqlite.damaged").read_bytes() == content
    again.add(entry(5))
    assert prompts(open_store(tmp_path)) == [[5]]


def test_a_database_of_something_else_is_left_alone(tmp_path):
    with sqlite3.connect(tmp_path / "store.sqlite") as database:
        database.execute("create table notes (text)")
    before = (tmp_path / "store.sqlite").read_bytes()
    with pytest.raises(StoreError, match="something else"):
        open_store(tmp_path)
    assert (tmp_path / "store.sqlite").read_bytes() == before


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(StoreError, match="cannot write"):
        open_store(tmp_path / "missing")


def test_a_failure_while_keeping_stops_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def full(found):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_insert", full)
    with pytest.warns(UserWarning, match="could not be kept"):
        store.add(entry(5))
