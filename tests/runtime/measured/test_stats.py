import pytest

from jetdraft.runtime.measured.stats import GuessRates, MethodStats, Round, Stats


def round_of(drafted, accepted):
    return Round(
        method="draft" if drafted else "none", width=drafted + 1, drafted=drafted,
        ranks=[(0, 1)] * accepted + [(1, 1)] * (accepted < drafted), target_seconds=0.0,
        draft_seconds=0.0,
    )  # fmt: skip


def test_metrics_have_the_meaning_the_design_gives_them():
    stats = Stats("draft", exact=True, prompt_tokens=4)
    for drafted, accepted in ((3, 3), (3, 1), (3, 0), (0, 0)):
        stats.add(round_of(drafted, accepted), accepted + 1)
    # Evaluated: 3 of 3; the right and the wrong one; the wrong one; none.
    assert stats.evaluated_by_position == [3, 2, 1]
    assert stats.accepted_by_position == [2 / 3, 1 / 2, 1.0]
    assert stats.acceptance_rate == pytest.approx(4 / 6)
    assert stats.tokens_per_pass == pytest.approx(8 / 4)
    assert stats.new_tokens == stats.target_passes + stats.accepted_tokens
    assert stats.rounds_by_choice == {"draft:3": 3, "none": 1}


def test_nothing_drafted_has_no_rate():
    stats = Stats("none", exact=True, prompt_tokens=4)
    stats.add(round_of(0, 0), 1)
    assert stats.acceptance_rate is None
    assert stats.to_json()["accepted_by_position"] == []


def test_merge_adds_generations():
    one, two = (Stats("draft", exact=True, prompt_tokens=4) for _ in range(2))
    one.add(round_of(1, 1), 2)
    two.add(round_of(3, 3), 4)
    one.merge(two)
    assert one.evaluated_by_position == [2, 1, 1]
    assert one.new_tokens == 6
    assert one.rounds_by_choice == {"draft:1": 1, "draft:3": 1}


def test_what_each_method_did():
    stats = Stats("auto", exact=True, prompt_tokens=4, plain_ms=2.0)
    drafted = round_of(3, 2)._replace(target_seconds=0.004, draft_seconds=0.001)
    stats.add(drafted, 3)
    stats.add(drafted, 3)
    stats.add(round_of(0, 0)._replace(target_seconds=0.002, off="it rains"), 1)
    other = Stats("auto", exact=True, prompt_tokens=4, plain_ms=2.0)
    other.add(round_of(0, 0)._replace(target_seconds=0.003, off="it rains"), 1)
    stats.merge(other)
    assert stats.by_method["draft"] == MethodStats(2, 6, 4, 6, pytest.approx(2.0), 6)
    assert stats.by_method["none"] == MethodStats(2, 0, 0, 2, pytest.approx(-1.0))
    assert stats.off == {"it rains": 2}
    assert stats.to_json()["by_method"]["draft"]["saved_ms"] == pytest.approx(2.0)


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
