"""Rates of guesses begin at held-out text and follow the text under way."""

import pytest

from jetdraft.runtime.measured.acceptance_rates import GuessRates

PRIORS = [[0.2, 0.1], [0.1, 0.1]]


def test_without_a_text_they_are_the_priors():
    rates = GuessRates(PRIORS)
    assert rates.ranks == [pytest.approx(of_depth) for of_depth in PRIORS]


def test_ranks_follow_the_text_whether_they_were_drafted_or_not():
    """The second guess of the first place is right, and no guess of the place after."""
    rates = GuessRates(PRIORS)
    for place in range(0, 400, 2):
        rates.add_guesses({place: [7, 3], place + 1: [7, 3]})
        rates.compare(place, [3, 9])
    assert rates.settled == 400
    (first, second), other = rates.ranks
    assert first < 0.05 < 0.85 < second
    assert max(other) < 0.05
    rates.forget()
    assert rates.ranks == [pytest.approx(of_depth) for of_depth in PRIORS]


def test_a_guess_waits_for_its_place():
    """A wrong draft leaves its later places open; another text leaves none."""
    rates = GuessRates([[0.5], [0.5]])
    rates.add_guesses({10: [1], 11: [2]})
    rates.compare(9, [5, 1])
    assert rates.settled == 1
    rates.compare(11, [2])
    assert rates.settled == 2
    rates.add_guesses({12: [1], 13: [2]})
    rates.begin()
    rates.compare(12, [1, 2])
    assert rates.settled == 2
