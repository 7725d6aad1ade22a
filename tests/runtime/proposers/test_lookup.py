import pytest

from jetdraft.runtime.proposers.lookup import Guess, LookupProposer


def draft(context, budget=3, **options):
    rows = LookupProposer(**options).propose(context, budget)
    assert rows.tokens[0] == context[-1]
    return rows.tokens[1:]


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], {}, [4, 5, 6]),
        # The longest match wins over a later match, and of equal matches the latest.
        ([7, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2], {"budget": 1}, [30]),
        ([1, 2, 30, 9, 1, 2, 40, 8, 1, 2], {"budget": 1}, [40]),
        # A draft is no longer than its match, the limit of matches or the budget.
        ([1, 2, 3, 9, 2], {}, [3]),
        ([1, 2, 3, 9, 1, 2], {}, [3, 9]),
        ([1, 2, 3, 4, 5, 1, 2, 3], {"max_match": 2}, [4, 5]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], {"budget": 2}, [4, 5]),
        # A repetition continues past the end.
        ([5, 5, 5, 5], {"budget": 8}, [5, 5, 5]),
        ([1, 2, 3, 1, 2, 3, 1, 2], {"budget": 8}, [3, 1, 2, 3, 1]),
        # Without a match there is no draft.
        ([1, 2, 3], {}, []),
        ([4], {}, []),
    ],
    ids=str,
)
def test_what_followed_the_last_time_is_drafted(context, options, expected):
    assert draft(context, **options) == expected


def test_drafted_tokens_are_looked_up_and_forgotten():
    proposer = LookupProposer()
    context = [1, 2, 3, 4, 5, 9, 1, 2]
    assert proposer.propose(context, 2).tokens[1:] == [3, 4]
    assert proposer.guess_after([3, 4], 3).tokens == [5, 9, 1]
    assert proposer.guess_after([7], 3).tokens == []
    assert proposer.propose([*context, 3], 2).tokens[1:] == [4, 5]


def test_the_evidence_is_the_length_of_the_match_in_doublings():
    text = list(range(100, 140))
    proposer = LookupProposer()
    for length, evidence in ((0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (9, 4), (40, 5)):
        proposer.propose([*text, 7, *text[20 - length // 2 :][:length]], 4)
        assert proposer.evidence == evidence, length


def test_a_later_token_rests_on_the_tokens_before_it_too():
    guess = Guess([7, 8, 9, 7], 0.0, match=3)
    assert [guess.evidence(place) for place in range(4)] == [2, 3, 3, 3]
    assert Guess([7] * 16, 0.0, match=16).evidence(15) == 5
