"""Sets of weights: whole after a kill, refused when damaged, shared by processes."""

import json
import os
import random
import sys

import numpy as np
import pytest

from jetdraft.bundle import Bundle
from jetdraft.errors import StoreError
from jetdraft.learning.lessons import (
    ARRAYS,
    CHOICE_FILE,
    EARLY_TOKENS,
    VERDICT_TOKENS,
    Tally,
    WeightSets,
    decide_trial,
    drafter_sha256,
)
from tests.programs import printed
from tests.toy_drafter import put_on_trial

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


def damaged(sets, name):
    file = sets.folder / name / ARRAYS
    content = bytearray(file.read_bytes())
    content[-200] ^= 1
    file.write_bytes(content)


def test_damaged_arrays_are_refused(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    damaged(sets, name)
    with pytest.raises(StoreError, match="damaged or missing"):
        sets.arrays(name)
    with pytest.raises(StoreError, match="damaged or missing"):
        sets.arrays("0" * 64)


def test_a_pipe_in_place_of_arrays_is_refused(toy, sets):
    name = put_on_trial(sets.folder, toy, ONES)
    (sets.folder / name / ARRAYS).unlink()
    os.mkfifo(sets.folder / name / ARRAYS)
    with pytest.raises(StoreError, match="damaged or missing"):
        sets.arrays(name)


@pytest.mark.parametrize(
    "array",
    [
        np.array([[np.nan, 1.0]], np.float32),
        np.array([[np.inf, 1.0]], np.float16),
        np.array([3, 4]),
        np.array(["text"]),
    ],
)
def test_arrays_that_are_no_weights_are_refused(toy, sets, array):
    name = put_on_trial(sets.folder, toy, {"matrix": array})
    with pytest.raises(StoreError, match="damaged or missing"):
        sets.arrays(name)


@pytest.mark.parametrize(
    "fields",
    [
        "no JSON",
        "[]",
        {"name": "../../etc", "before": None, "base": ""},
        {"name": 7, "before": None, "base": ""},
        {"name": ""},
    ],
)
def test_a_malformed_choice_chooses_no_set(sets, fields):
    text = fields if isinstance(fields, str) else json.dumps(fields)
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
    assert decide_trial(tally(*before), tally(*after)) is verdict


def trial(draw, old, new):
    """The verdict on weights of two true rates, with ten tokens a generation."""
    before, after = Tally(), Tally()
    while not before.is_full:
        before.add(sum(draw.random() < old for _ in range(10)), 10)
    while (verdict := decide_trial(before, after)) is None:
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
