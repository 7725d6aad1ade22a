"""What users wrote lies in files of two kinds: whole, private, and never in the way."""

import os
import random
import sqlite3
import stat
import subprocess
import sys
import warnings
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.learning.lessons import LESSONS_FILE, Lesson, Lessons
from jetdraft.runtime.history.store import Entry, ResponseStore


class Responses:
    name = "store.sqlite"

    def open(self, folder, tokenizer="tokens"):
        return ResponseStore(folder / self.name, tokenizer)

    def add(self, store, token, user="", size=2):
        vector = np.zeros(0, np.float32)
        store.of(user).add(Entry([token], list(range(1, 1 + size)), vector))

    def tokens(self, store):
        return [entry.prompt[0] for entry in store.entries]


class Taught:
    """Lessons, which begin with a token."""

    name = LESSONS_FILE

    def open(self, folder, tokenizer="tokens"):
        return Lessons(folder, tokenizer, 100)

    def add(self, store, token, user="", size=2):
        tokens = np.array([token, *[6] * (size - 1)])
        row = np.full((1, 2), 7), np.ones((1, 2), np.float32)
        store.add(Lesson(tokens, np.array([1]), *row), user)

    def tokens(self, store):
        return [int(lesson.tokens[0]) for lesson in store.read()]


@pytest.fixture(params=[Responses(), Taught()], ids=lambda kind: type(kind).__name__)
def kind(request):
    return request.param


def test_only_its_owner_can_read_it(kind, tmp_path):
    (tmp_path / kind.name).touch(mode=0o644)
    kind.add(kind.open(tmp_path), 5)
    assert stat.S_IMODE((tmp_path / kind.name).stat().st_mode) == 0o600


def test_another_tokenizer_is_refused(kind, tmp_path):
    kind.add(kind.open(tmp_path), 5)
    with pytest.raises(StoreError, match="another tokenizer"):
        kind.open(tmp_path, "others")
    assert kind.tokens(kind.open(tmp_path)) == [5]


def damage_header(content):
    """The id of ours is left."""
    content[:60] = b"x" * 60


def damage_middle(content):
    content[4096:8096] = b"x" * 4000


def damage_by_zeros(content):
    content[:] = bytes(len(content))


@pytest.mark.parametrize("damage", [damage_header, damage_middle, damage_by_zeros])
def test_a_damaged_file_is_moved_aside(kind, tmp_path, damage):
    store, file = kind.open(tmp_path), tmp_path / kind.name
    for token in range(50):
        kind.add(store, token, size=500)
    content = bytearray(file.read_bytes())
    damage(content)
    for number in ("", "-2"):
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="is damaged; it was moved"):
            again = kind.open(tmp_path)
        assert kind.tokens(again) == []
        assert (tmp_path / f"{kind.name}.damaged{number}").read_bytes() == content
    kind.add(again, 5)
    assert kind.tokens(kind.open(tmp_path)) == [5]
    again.clear()
    left = [path.name for path in tmp_path.iterdir()]
    assert left == [kind.name], "nobody knows whose texts the others hold"


def test_random_damage_never_ends_in_anything_else(kind, tmp_path):
    store, file = kind.open(tmp_path), tmp_path / kind.name
    for token in range(20):
        kind.add(store, token, size=100)
    content, chance = file.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(40):
            damaged[chance.randrange(100, len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with suppress(StoreError):
                kind.add(kind.open(tmp_path), 5)


def as_database(file):
    with sqlite3.connect(file) as database:
        database.execute("create table notes (text)")


def as_text(file):
    file.write_text("what I have to do\n" * 10)


def as_zeros_and_more(file):
    file.write_bytes(bytes(5000) + b"precious")


@pytest.mark.parametrize("make", [as_database, as_text, as_zeros_and_more])
def test_what_is_something_else_is_left_alone(kind, tmp_path, make):
    file = tmp_path / kind.name
    make(file)
    file.chmod(0o644)
    before = file.read_bytes()
    with pytest.raises(StoreError, match="not a store of responses; choose another"):
        kind.open(tmp_path)
    assert file.read_bytes() == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [kind.name]


def test_a_folder_is_no_store(kind, tmp_path):
    (tmp_path / kind.name).mkdir(mode=0o755)
    with pytest.raises(StoreError, match="not a store of responses"):
        kind.open(tmp_path)
    assert stat.S_IMODE((tmp_path / kind.name).stat().st_mode) == 0o755


def test_users_clear_only_what_is_theirs(kind, tmp_path):
    store = kind.open(tmp_path)
    kind.add(store, 5, "ann")
    kind.add(store, 77)
    ann = (
        (store.of("ann").clear,) if kind.name != LESSONS_FILE else (store.clear, "ann")
    )
    assert ann[0](*ann[1:]) == 1
    assert kind.tokens(kind.open(tmp_path)) == [77]
    assert b"ann" not in (tmp_path / kind.name).read_bytes(), "erased, not unlinked"


def test_a_lock_of_another_process_is_said(kind, tmp_path, monkeypatch):
    store, connect = kind.open(tmp_path), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda file, timeout=0: connect(file, 0.01))
    with closing(connect(tmp_path / kind.name)) as other:
        other.execute("begin exclusive")
        with pytest.raises(StoreError, match="cannot clear"):
            store.clear()
        with pytest.raises(StoreError, match="cannot use"):
            kind.open(tmp_path)
        with pytest.warns(UserWarning, match="could not be kept"):
            kind.add(store, 5)
    assert os.listdir(tmp_path) == [kind.name]


def test_a_file_that_was_removed_is_made_again(kind, tmp_path):
    store = kind.open(tmp_path)
    (tmp_path / kind.name).unlink()
    kind.add(store, 5)
    assert kind.tokens(store) == kind.tokens(kind.open(tmp_path)) == [5]


def write(name, folder, first):
    """What the processes of the next test do."""
    kind = {"Responses": Responses, "Taught": Taught}[name]()
    for token in range(first, first + 20):
        kind.add(kind.open(folder), token)


def test_two_processes_share_a_file(kind, tmp_path):
    code = (
        "import sys; from pathlib import Path;"
        " from tests.learning.test_store_file import write;"
        " write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))"
    )
    command = [sys.executable, "-W", "error", "-c", code, type(kind).__name__, tmp_path]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen([*command, str(t)], cwd=root) for t in (0, 50)]
    assert [process.wait() for process in running] == [0, 0]
    assert sorted(kind.tokens(kind.open(tmp_path))) == [*range(20), *range(50, 70)]
