"""Lessons: kept for their users, bounded, and harmless whatever is in the file."""

import sqlite3
import stat
from contextlib import closing

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.learning import lessons as module
from jetdraft.learning.lessons import LESSONS_FILE, Lesson, Lessons

VOCABULARY = 100


def open_lessons(folder):
    return Lessons(folder, "tokens", VOCABULARY)


def lesson(*tokens, places=(1,), best=7):
    ids = np.full((len(places), 2), best)
    return Lesson(
        np.array(tokens), np.array(places), ids, np.ones(ids.shape, np.float32)
    )


def tokens(lessons):
    return [one.tokens.tolist() for one in lessons.read()]


def test_lessons_come_back_latest_first(tmp_path):
    lessons = open_lessons(tmp_path / "new" / "folder")
    lessons.add(lesson(5, 6, 8, places=(1, 2)))
    lessons.add(lesson(9, 9), "ann")
    first, second = open_lessons(tmp_path / "new" / "folder").read()
    assert first.tokens.tolist() == [9, 9]
    assert second.places.tolist() == [1, 2]
    assert second.ids.tolist() == [[7, 7], [7, 7]]
    assert second.logits.dtype == np.float32


def test_only_its_owner_can_list_the_folder(tmp_path):
    open_lessons(tmp_path / "learned").add(lesson(5, 6))
    assert stat.S_IMODE((tmp_path / "learned").stat().st_mode) == 0o700


def test_their_number_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LESSONS", 2)
    monkeypatch.setattr(module, "MAX_IN_ALL", 3)
    lessons = open_lessons(tmp_path)
    for token in range(4):
        lessons.add(lesson(token, 6), "ann")
    assert tokens(lessons) == [[3, 6], [2, 6]]
    for user in ("bob", "eve"):
        lessons.add(lesson(9, 9), user)
    assert tokens(lessons) == [[9, 9], [9, 9], [3, 6]]


def test_old_lessons_go(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database, database:
        database.execute("update lessons set kept = 1000")
    assert tokens(lessons) == []
    lessons.add(lesson(7, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database:
        [(count,)] = database.execute("select count(*) from lessons")
    assert count == 1


POISON = [
    ("tokens", np.array([VOCABULARY, 1], np.uint32).tobytes()),
    ("tokens", b""),
    ("tokens", b"123"),
    ("tokens", "text"),
    ("tokens", 7),
    ("tokens", b"\0" * (4 * module.MAX_TOKENS + 4)),
    ("places", np.array([0], np.uint32).tobytes()),
    ("places", np.array([2], np.uint32).tobytes()),
    ("places", b""),
    ("places", np.ones(module.MAX_PLACES + 1, np.uint32).tobytes()),
    ("ids", np.array([1, VOCABULARY], np.uint32).tobytes()),
    ("ids", b""),
    ("logits", np.array([1, np.nan], np.float32).tobytes()),
    ("logits", np.array([1], np.float32).tobytes()),
    ("logits", "text"),
    ("kept", 1e300),
    ("kept", "text"),
]


@pytest.mark.parametrize(("column", "value"), POISON)
def test_a_poisoned_row_is_left_out(tmp_path, column, value):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(1, 2))
    lessons.add(lesson(5, 6))
    with closing(sqlite3.connect(tmp_path / LESSONS_FILE)) as database, database:
        database.execute(f"update lessons set {column} = ? where id = 1", (value,))
    assert tokens(lessons) == [[5, 6]]


def test_a_file_that_is_damaged_meanwhile_is_said(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6))
    content = bytearray((tmp_path / LESSONS_FILE).read_bytes())
    content[200:] = b"x" * (len(content) - 200)
    (tmp_path / LESSONS_FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="could not be kept"):
        lessons.add(lesson(5, 6))
    with pytest.raises(StoreError, match="cannot read"):
        lessons.read()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "notes").write_text("what I have to do")
    with pytest.raises(StoreError, match="cannot make the folder"):
        open_lessons(tmp_path / "notes")
