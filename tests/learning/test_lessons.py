"""Lessons: kept for their users, bounded, and harmless whatever is in the file."""

import json
import os
import random
import sqlite3
import stat
import sys
from contextlib import closing

import numpy as np
import pytest

from jetdraft.bundle import Bundle
from jetdraft.errors import StoreError
from jetdraft.learning import lessons as module
from jetdraft.learning.lessons import (
    ARRAYS,
    CHOICE_FILE,
    EARLY_TOKENS,
    LESSONS_FILE,
    VERDICT_TOKENS,
    Lesson,
    Lessons,
    Tally,
    WeightSets,
    drafter_sha256,
    judge_trial,
)
from tests.programs import printed
from tests.toy_drafter import put_on_trial

VOCABULARY = 100


def open_lessons(folder):
    return Lessons(folder, "tokens", VOCABULARY)


def lesson(*tokens, places=(1,), best=7):
    ids = np.full((len(places), 2), best)
    logits = np.ones(ids.shape, np.float32)
    return Lesson(np.array(tokens), np.array(places), ids, logits)


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
    *(("tokens", value) for value in (b"", b"123", "text", 7)),
    ("tokens", b"\0" * (4 * module.MAX_TOKENS + 4)),
    ("places", np.array([0], np.uint32).tobytes()),
    ("places", np.array([2], np.uint32).tobytes()), ("places", b""),
    ("places", np.ones(module.MAX_PLACES + 1, np.uint32).tobytes()),
    ("ids", np.array([1, VOCABULARY], np.uint32).tobytes()), ("ids", b""),
    ("logits", np.array([1, np.nan], np.float32).tobytes()),
    ("logits", np.array([1], np.float32).tobytes()), ("logits", "text"),
    ("kept", 1e300), ("kept", "text"),
]  # fmt: skip


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


ONES = {"matrix": np.ones((4, 4), np.float32)}
TWOS = {"matrix": np.full((4, 4), 2, np.float32)}


@pytest.fixture
def sets(toy, tmp_path):
    return WeightSets(tmp_path, drafter_sha256(Bundle.open(toy)))


def test_a_trial_is_kept_or_taken_back(toy, sets):
    one = put_on_trial(sets.folder, toy, ONES)
    assert (sets.read_choice().name, sets.read_choice().before) == (one, "")
    assert sets.arrays(one)["matrix"].tolist() == ONES["matrix"].tolist()
    sets.settle(one, keep=True)
    two = put_on_trial(sets.folder, toy, TWOS, before=one)
    sets.settle(one, keep=False)
    assert sets.read_choice().name == two, "only the trial of the chosen set ends"
    sets.settle(two, keep=False)
    sets.settle(two, keep=True)
    assert (sets.read_choice().name, sets.read_choice().before) == (one, None)
    assert not (sets.folder / two).exists()
    sets.clear()
    assert sets.read_choice().name == ""
    assert not (sets.folder / one).exists()


def test_only_sets_are_swept(toy, sets):
    for name in ("notes", "0" * 63, ".partial"):
        (sets.folder / name).mkdir()
    (sets.folder / ".partial-killed").mkdir()
    sets.clear()
    left = {entry.name for entry in sets.folder.iterdir()}
    assert left == {"notes", "0" * 63, ".partial", "lock", CHOICE_FILE}


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [flip_a_bit, replace_by_a_pipe])
def test_damaged_and_missing_arrays_are_refused(toy, sets, damage):
    name = put_on_trial(sets.folder, toy, ONES)
    damage(sets.folder / name / ARRAYS)
    for each in (name, "0" * 64):
        with pytest.raises(StoreError, match="damaged or missing"):
            sets.arrays(each)


NOT_FINITE = np.float32([[np.nan, 1.0]]), np.float16([[np.inf, 1.0]])


@pytest.mark.parametrize("array", [*NOT_FINITE, np.array([3, 4]), np.array(["text"])])
def test_arrays_that_are_no_weights_are_refused(toy, sets, array):
    name = put_on_trial(sets.folder, toy, {"matrix": array})
    with pytest.raises(StoreError, match="damaged or missing"):
        sets.arrays(name)


REST = {"before": None, "base": ""}
NO_CHOICES = [REST | {"name": "../../etc"}, REST | {"name": 7}, {"name": ""}]


@pytest.mark.parametrize("text", ["no JSON", "[]", *map(json.dumps, NO_CHOICES)])
def test_a_malformed_choice_chooses_no_set(sets, text):
    (sets.folder / CHOICE_FILE).write_text(text)
    sets.check()
    assert (sets.read_choice().name, sets.read_choice().before) == ("", None)


def test_sets_of_another_drafter_are_refused(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    other = WeightSets(sets.folder, "0" * 64)
    with pytest.raises(StoreError, match="another drafter"):
        other.check()
    assert other.read_choice().name == ""
    other.settle(name, keep=True)
    assert other.read_choice().name == ""


def test_a_folder_that_cannot_be_written_only_warns(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    (sets.folder / "lock").mkdir()
    with pytest.warns(UserWarning, match="no verdict"):
        sets.settle(name, keep=False)
    assert sets.read_choice().name == name


def test_a_kill_leaves_one_whole_set(tmp_path):
    report = printed(sys.executable, "-m", "tests.swap_kills", tmp_path, "30")
    steps = json.loads(report)
    assert set(steps["publish"]["found"]) == {"1.0", "2.0"}
    assert set(steps["back"]["found"]) == {"2.0", "1.0"}
    assert set(steps["keep"]["found"]) == {"2.0"}
    assert set(steps["clear"]["found"]) == {"2.0", "own"}


def tally(accepted, evaluated):
    made = Tally()
    made.add(accepted, evaluated)
    return made


def test_only_the_latest_generations_count():
    made = Tally()
    made.add(0, 100)
    for _ in range(4):
        made.add(50, 100)
        assert made.is_full == (made.evaluated >= VERDICT_TOKENS)
    assert (made.accepted, made.evaluated, made.rate) == (150, 300, 0.5)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((128, 256), (0, EARLY_TOKENS - 1), None),
        ((128, 256), (0, EARLY_TOKENS), False),
        ((128, 256), (28, EARLY_TOKENS), None),
        ((128, 256), (EARLY_TOKENS, EARLY_TOKENS), None),
        ((128, 256), (127, VERDICT_TOKENS), False),
        ((128, 256), (128, VERDICT_TOKENS), True),
        ((0, 256), (0, VERDICT_TOKENS), True),
        ((256, 256), (EARLY_TOKENS, EARLY_TOKENS), None),
    ],
)
def test_verdicts(before, after, verdict):
    assert judge_trial(tally(*before), tally(*after)) is verdict


def trial(draw, old, new):
    """The verdict on weights of two true rates, with ten tokens a generation."""
    before, after = Tally(), Tally()
    while not before.is_full:
        before.add(sum(draw.random() < old for _ in range(10)), 10)
    while (verdict := judge_trial(before, after)) is None:
        after.add(sum(draw.random() < new for _ in range(10)), 10)
    return verdict, after.evaluated


def test_how_often_chance_decides():
    draw = random.Random(0)
    kept = {
        new: sum(trial(draw, 0.5, new)[0] for _ in range(400)) / 400
        for new in (0.4, 0.456, 0.5, 0.6)
    }
    assert kept[0.4] < 0.03
    assert 0.10 < kept[0.456] < 0.22  # one standard error
    assert 0.42 < kept[0.5] < 0.60
    assert kept[0.6] > 0.97
    verdict, tokens = trial(draw, 0.6, 0.05)
    assert not verdict
    assert tokens < EARLY_TOKENS + 20, "clear losses end early"
