"""Earlier responses: kept for one user, bounded, and never in the way."""

import os
import random
import sqlite3
import stat
import subprocess
import sys
import time
import warnings
from contextlib import closing, suppress

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.runtime.history.store import MOST_TOKENS, MOST_USERS, Entry, ResponseStore

NOWHERE = np.zeros(0, np.float32)


def open_store(folder, **options):
    return ResponseStore(folder / "store.sqlite", "tokens", **options)


def entry(*prompt, response=(1, 2)):
    return Entry(list(prompt), list(response), NOWHERE)


def prompts(store):
    return [entry.prompt for entry in store.entries]


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
    for number in range(MOST_USERS):
        store.of(f"user {number}")
    assert store.of("ann") is not ann, "memory is bounded"
    assert prompts(store.of("ann")) == [[2], [1]]


def test_another_user_of_a_file_that_is_damaged_meanwhile(tmp_path):
    store = open_store(tmp_path)
    for token in range(50):
        store.add(entry(token, response=range(500)))
    content = bytearray(store.file.read_bytes())
    damage_middle(content)
    store.file.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        assert store.of("ann").entries == []


def test_the_same_request_is_kept_once(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[1]))
    store.add(entry(5, response=[2]))
    assert [entry.response for entry in store.entries] == [[2]]


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


def damage_header(content):
    """The id of ours is left."""
    content[:60] = b"x" * 60


def damage_middle(content):
    content[4096:8096] = b"x" * 4000


def damage_by_zeros(content):
    content[:] = bytes(len(content))


@pytest.mark.parametrize("damage", [damage_header, damage_middle, damage_by_zeros])
def test_a_damaged_file_is_moved_aside(tmp_path, damage):
    store = open_store(tmp_path)
    for token in range(50):
        store.add(entry(token, response=range(500)))
    content = bytearray(store.file.read_bytes())
    damage(content)
    for name in ("store.sqlite.damaged", "store.sqlite.damaged-2"):
        store.file.write_bytes(content)
        with pytest.warns(UserWarning, match="damaged"):
            again = open_store(tmp_path)
        assert again.entries == []
        assert (tmp_path / name).read_bytes() == content
    again.add(entry(5))
    assert prompts(open_store(tmp_path)) == [[5]]
    again.clear()
    assert [file.name for file in tmp_path.iterdir()] == ["store.sqlite"]


def test_random_damage_never_ends_in_anything_else(tmp_path):
    store = open_store(tmp_path)
    for token in range(20):
        store.add(entry(token, response=range(100)))
    content, chance = store.file.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(40):
            damaged[chance.randrange(100, len(damaged))] = chance.randrange(256)
        store.file.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(StoreError):
                open_store(tmp_path).add(entry(5))


def as_database(file):
    with sqlite3.connect(file) as database:
        database.execute("create table notes (text)")


def as_text(file):
    file.write_text("what I have to do\n" * 10)


@pytest.mark.parametrize("make", [as_database, as_text])
def test_what_is_something_else_is_left_alone(tmp_path, make):
    file = tmp_path / "store.sqlite"
    make(file)
    file.chmod(0o644)
    before = file.read_bytes()
    with pytest.raises(StoreError, match="not a store of responses"):
        open_store(tmp_path)
    assert file.read_bytes() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == ["store.sqlite"]


def test_a_folder_is_no_store(tmp_path):
    (tmp_path / "store.sqlite").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="not a store of responses"):
        open_store(tmp_path)
    assert stat.S_IMODE((tmp_path / "store.sqlite").stat().st_mode) == 0o755


def test_old_entries_of_everyone_go(tmp_path, monkeypatch):
    open_store(tmp_path, user="bob").add(entry(5))
    later = time.time() + 40 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    ann = open_store(tmp_path, user="ann")
    with sqlite3.connect(ann.file) as database:
        assert database.execute("select count(*) from entries").fetchone() == (0,)


def test_a_shorter_run_of_the_same_keeps_the_longer_response(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[1, 2, 3]))
    store.add(entry(6))
    store.add(entry(5, response=[1, 2]))
    assert [(e.prompt, e.response) for e in store.entries] == [
        ([5], [1, 2, 3]),
        ([6], [1, 2]),
    ]


def test_an_empty_response_is_not_kept(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[]))
    assert store.entries == []


def test_entries_that_nobody_could_draft_are_left_out(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5, response=[7, 300]))
    store.add(entry(6, response=[7]))
    assert prompts(open_store(tmp_path, vocab_size=300)) == [[6]]
    with sqlite3.connect(store.file) as database:
        database.execute("update entries set response = x'010203'")
    assert open_store(tmp_path).entries == []


def test_a_user_must_be_a_name(tmp_path):
    with pytest.raises(StoreError, match="unprintable"):
        open_store(tmp_path, user="\udcff")


def test_a_lock_of_another_process_is_said(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda file, timeout=0: connect(file, 0.01))
    with closing(connect(store.file)) as other:
        other.execute("begin exclusive")
        with pytest.raises(StoreError, match="cannot clear"):
            store.clear()
        with pytest.raises(StoreError, match="cannot use"):
            open_store(tmp_path)
        with pytest.warns(UserWarning, match="could not be kept"):
            store.add(entry(5))
    assert os.listdir(tmp_path) == ["store.sqlite"]


WRITER = """
import sys
import numpy as np
from pathlib import Path
from jetdraft.runtime.history.store import Entry, ResponseStore
file, first = Path(sys.argv[1]), int(sys.argv[2])
for token in range(first, first + 20):
    store = ResponseStore(file, "tokens", "ann")
    store.add(Entry([token], [1], np.zeros(0, np.float32)))
"""


def test_two_processes_share_a_store(tmp_path):
    file = tmp_path / "store.sqlite"
    command = [sys.executable, "-W", "error", "-c", WRITER, str(file)]
    running = [subprocess.Popen([*command, str(first)]) for first in (0, 100)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(open_store(tmp_path, user="ann").entries) == 40


def test_where_it_cannot_be_written(tmp_path):
    with pytest.raises(StoreError, match="cannot write"):
        open_store(tmp_path / "missing")


def test_a_failure_while_keeping_stops_nothing(tmp_path, monkeypatch):
    store = open_store(tmp_path)

    def full(entry):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_insert", full)
    with pytest.warns(UserWarning, match="could not be kept"):
        store.add(entry(5))


def test_a_response_that_is_a_text_is_replaced(tmp_path):
    store = open_store(tmp_path)
    store.add(entry(5))
    with sqlite3.connect(store.file) as database:
        database.execute("update entries set response = 'hello'")
    again = open_store(tmp_path)
    assert again.entries == []
    again.add(entry(5, response=[7]))
    assert [entry.response for entry in again.entries] == [[7]]


def test_a_file_that_was_removed_is_made_again(tmp_path):
    store = open_store(tmp_path)
    store.file.unlink()
    store.add(entry(5))
    assert prompts(open_store(tmp_path)) == [[5]]
