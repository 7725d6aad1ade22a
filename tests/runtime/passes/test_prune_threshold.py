"""The threshold that adapts finds the one that pays most."""

import pytest

from jetdraft.runtime.passes.split.pruned_halves import THRESHOLD_CHOICES, Threshold


def settle(would, rounds=400):
    """What is chosen most, once rounds have shown what each threshold would do."""
    threshold, chosen = Threshold(), []
    for _ in range(rounds):
        used = threshold.choose()
        chosen.append(used)
        threshold.observe(used, would)
    late = chosen[rounds // 2 :]
    return max(set(late), key=late.count), late


def test_pruning_that_costs_no_tokens_is_taken():
    best, _ = settle(lambda least: (3.0, 10.0 - 5.0 * (least >= 0.1)))
    assert best == 0.1


def test_pruning_that_costs_more_tokens_than_time_is_not():
    best, _ = settle(lambda least: (3.0 - 2.0 * (least > 0), 10.0 - 2.0 * (least > 0)))
    assert best == 0.0


@pytest.mark.parametrize("best", THRESHOLD_CHOICES)
def test_any_choice_can_be_the_best(best):
    assert settle(lambda least: (1.0 + (least == best), 1.0))[0] == best


def test_lower_thresholds_are_looked_at_now_and_then():
    """What changed for the better below the one in use is noticed."""
    threshold = Threshold()
    for _ in range(100):
        threshold.observe(threshold.choose(), lambda t: (1.0 + (t == 0.3), 1.0))
    for _ in range(400):
        threshold.observe(threshold.choose(), lambda t: (1.0 + 2 * (t == 0.01), 1.0))
    used = [threshold.choose() for _ in range(2 * Threshold.REFRESH)]
    assert max(set(used), key=used.count) == 0.01
