import numpy as np

from jetdraft.runtime.proposers import LookupProposer


def draft(context, budget=3, **options):
    rows = LookupProposer(**options).propose(np.array(context), budget)
    assert rows.tokens[0] == context[-1]
    return rows.tokens[1:].tolist()


def test_proposes_what_followed():
    assert draft([1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5]


def test_the_longest_match_wins_over_a_later_one():
    assert draft([7, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2], budget=1) == [30]


def test_the_latest_of_equal_matches_wins():
    assert draft([1, 2, 30, 9, 1, 2, 40, 8, 1, 2], budget=1) == [40]


def test_a_match_may_overlap_the_suffix():
    assert draft([5, 5, 5, 5], budget=3) == [5]
    assert draft([1, 2, 1, 2, 1, 2], budget=4) == [1, 2]


def test_nothing_without_a_match_of_two():
    assert draft([1, 2, 3, 9, 2]) == []
    assert draft([4]) == []
    assert draft([4, 4]) == []


def test_one_token_may_be_enough_if_asked():
    assert draft([1, 2, 3, 9, 2], min_match=1) == [3, 9, 2]


def test_the_budget_holds():
    assert draft([1, 2, 3, 4, 5, 6, 1, 2], budget=2) == [3, 4]
