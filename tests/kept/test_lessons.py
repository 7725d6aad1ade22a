"""Lessons: kept for their users, bounded, and harmless whatever is in the file."""

import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from jetdraft.errors import StoreError
from jetdraft.kept import lessons as module
from jetdraft.kept.lessons import FILE, Lesson, Lessons

VOCABULARY = 100


def open_lessons(folder, tokenizer="tokens"):
    return Lessons(folder, tokenizer, VOCABULARY)


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


def test_only_its_owner_can_read_them(tmp_path):
    open_lessons(tmp_path / "learned").add(lesson(5, 6))
    assert stat.S_IMODE((tmp_path / "learned").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "learned" / FILE).stat().st_mode) == 0o600


def test_a_user_clears_only_what_is_theirs(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6), "ann")
    lessons.add(lesson(5, 77), "bob")
    assert lessons.clear("ann") == 1
    assert tokens(lessons) == [[5, 77]]
    assert b"ann" not in (tmp_path / FILE).read_bytes(), "erased, not unlinked"


def test_their_number_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_LESSONS", 2)
    monkeypatch.setattr(module, "MOST_IN_ALL", 3)
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
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute("update lessons set kept = 1000")
    assert tokens(lessons) == []
    lessons.add(lesson(7, 6))
    with closing(sqlite3.connect(tmp_path / FILE)) as database:
        [(count,)] = database.execute("select count(*) from lessons")
    assert count == 1


POISON = [
    ("tokens", np.array([VOCABULARY, 1], np.uint32).tobytes()),
    ("tokens", b""),
    ("tokens", b"123"),
    ("tokens", "text"),
    ("tokens", 7),
    ("tokens", b"\0" * (4 * module.MOST_TOKENS + 4)),
    ("places", np.array([0], np.uint32).tobytes()),
    ("places", np.array([2], np.uint32).tobytes()),
    ("places", b""),
    ("places", np.ones(module.MOST_PLACES + 1, np.uint32).tobytes()),
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
    with closing(sqlite3.connect(tmp_path / FILE)) as database, database:
        database.execute(f"update lessons set {column} = ? where id = 1", (value,))
    assert tokens(lessons) == [[5, 6]]


def test_a_damaged_file_is_moved_aside(tmp_path):
    lessons = open_lessons(tmp_path)
    lessons.add(lesson(5, 6))
    content = bytearray((tmp_path / FILE).read_bytes())
    content[200:] = b"x" * (len(content) - 200)
    (tmp_path / FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="could not be kept"):
        lessons.add(lesson(5, 6))
    with pytest.raises(StoreError, match="cannot read"):
        lessons.read()
    with pytest.warns(UserWarning, match="is damaged; it was moved"):
        again = open_lessons(tmp_path)
    assert tokens(again) == []
    again.add(lesson(8, 9))
    assert tokens(again) == [[8, 9]]
    [aside] = tmp_path.glob("*.damaged*")
    assert again.clear("others") == 0
    assert not aside.exists(), "nobody knows whose texts it holds"


def test_other_files_are_refused(tmp_path):
    open_lessons(tmp_path)
    with pytest.raises(StoreError, match="another tokenizer"):
        open_lessons(tmp_path, "others")
    (tmp_path / "notes").write_text("what I have to do")
    with pytest.raises(StoreError, match="cannot make the folder"):
        open_lessons(tmp_path / "notes")
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).write_text("what I have to do" * 20)
    with pytest.raises(StoreError, match="choose another"):
        open_lessons(other)


def test_a_removed_file_is_begun_again(tmp_path):
    lessons = open_lessons(tmp_path)
    (tmp_path / FILE).unlink()
    lessons.add(lesson(5, 6))
    assert tokens(lessons) == [[5, 6]]


WRITER = """\
import sys
from pathlib import Path
import numpy as np
from jetdraft.kept.lessons import Lesson, Lessons

lessons = Lessons(Path(sys.argv[1]), "tokens", 100)
for token in range(20):
    row = np.full((1, 2), token), np.ones((1, 2), np.float32)
    lessons.add(Lesson(np.array([token, 6]), np.array([1]), *row), sys.argv[2])
"""


def test_two_processes_share_a_folder(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, tmp_path, user])
        for user in ("ann", "bob")
    ]
    assert [writer.wait() for writer in writers] == [0, 0]
    lessons = open_lessons(tmp_path)
    assert sorted(tokens(lessons)) == sorted([[t, 6] for t in range(20)] * 2)
    assert lessons.clear("ann") == 20
