"""The verdict on new weights: late or clear, never by chance alone."""

import random

import pytest

from jetdraft.kept.tally import EARLY, WINDOW, Tally, is_better


def tally(accepted, evaluated):
    made = Tally()
    made.add(accepted, evaluated)
    return made


def test_only_the_latest_generations_count():
    made = Tally()
    made.add(0, 100)
    for _ in range(4):
        made.add(50, 100)
        assert made.is_full == (made.evaluated >= WINDOW)
    assert (made.accepted, made.evaluated, made.rate) == (150, 300, 0.5)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((128, 256), (0, EARLY - 1), None),
        ((128, 256), (0, EARLY), False),
        ((128, 256), (28, EARLY), None),
        ((128, 256), (EARLY, EARLY), None),
        ((128, 256), (127, WINDOW), False),
        ((128, 256), (128, WINDOW), True),
        ((0, 256), (0, WINDOW), True),
        ((256, 256), (EARLY, EARLY), None),
    ],
)
def test_verdicts(before, after, verdict):
    assert is_better(tally(*before), tally(*after)) is verdict


def trial(draw, old, new):
    """The verdict on weights of two true rates, with ten tokens a generation."""
    before, after = Tally(), Tally()
    while not before.is_full:
        before.add(sum(draw.random() < old for _ in range(10)), 10)
    while (verdict := is_better(before, after)) is None:
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
    assert tokens < EARLY + 20, "clear losses end early"
