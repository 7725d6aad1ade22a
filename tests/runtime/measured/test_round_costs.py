"""Times of rounds: those of passes, corrected, and a line for what lies outside."""

from __future__ import annotations

import pytest

from jetdraft.runtime.measured.round_costs import Line, RoundCosts
from jetdraft.runtime.measured.stats import Round


def pass_ms(rows: int, probes: int) -> float:
    return 1.0 + 0.2 * rows + 0.1 * probes


def round_of(drafted: int, probes: int, longer: float, outside_ms: float) -> Round:
    target = 1e-3 * longer * pass_ms(1 + drafted, probes)
    seconds = target + 1e-3 * outside_ms
    return Round("ppd", 8, drafted, [], target, 0.0, probes, seconds=seconds)


def test_without_rounds_a_round_is_its_pass():
    assert RoundCosts(pass_ms).ms(4, 6) == pass_ms(4, 6)


def test_rounds_say_how_much_longer_passes_are_and_what_lies_outside():
    costs = RoundCosts(pass_ms)
    for drafted in (0, 3, 7, 3, 0):
        costs.learn(round_of(drafted, 2, 1.5, 0.4 + 0.1 * drafted))
    assert costs.ms(16, 9) == pytest.approx(1.5 * pass_ms(16, 9) + 0.4 + 1.5)
    costs.forget()
    assert costs.ms(16, 9) == pass_ms(16, 9)


def test_rounds_of_one_size_do_not_hide_what_smaller_rounds_take():
    """After rounds of 7 rows alone, a round of 7 costs what it took, and others less:
    so a plan tries a smaller tree, and learns what that takes."""
    costs = RoundCosts(pass_ms)
    for _ in range(5):
        costs.learn(round_of(7, 0, 1.0, 0.7))
    assert costs.ms(8, 0) == pytest.approx(pass_ms(8, 0) + 0.7)
    assert costs.ms(1, 0) < pass_ms(1, 0) + 0.1


def test_a_stall_says_little():
    costs = RoundCosts(pass_ms)
    for _ in range(20):
        costs.learn(round_of(3, 0, 1.0, 0.5))
    before = costs.ms(4, 0)
    costs.learn(round_of(3, 0, 100.0, 500.0))
    assert costs.ms(4, 0) < 1.2 * before


def test_a_line_never_falls_and_is_never_below_zero():
    line = Line(memory=1.0)
    line.add(0.0, 2.0)
    line.add(4.0, 1.0)
    assert line.at(0.0) == line.at(9.0) == 1.5
    steep = Line(memory=1.0)
    steep.add(1.0, 0.1)
    steep.add(2.0, 2.1)
    assert steep.at(0.0) == 0.0
