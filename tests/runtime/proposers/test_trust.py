"""Guesses are preferred where they were right more often than a drafter."""

import pytest

from jetdraft.methods.cascade.method import Trial, Trust

RIGHT, WRONG = 4, 5


def taught(own, guess, evidence=2, rounds=30):
    """After rounds of one token, in which both or either were right."""
    trust, context = Trust(), [1]
    for _ in range(rounds):
        token, guessed = (RIGHT if right else WRONG for right in (own, guess))
        trust.keep_draft(context, [Trial(token, guessed, evidence, own=True)])
        context = [*context, RIGHT]
        trust.learn(context)
    return trust


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("guess", [True, False])
def test_the_better_is_preferred(own, guess):
    assert taught(own, guess).prefers(2) == (guess and not own)


def test_each_evidence_has_rates_of_its_own():
    trust = taught(own=False, guess=True, evidence=1)
    assert trust.prefers(1)
    assert not trust.prefers(2), "the drafter may be right after longer matches"


def test_only_long_matches_are_trusted_from_the_start():
    trust = Trust()
    assert [trust.prefers(evidence) for evidence in (1, 2, 3, 4, 5)] == [
        *[False] * 3,
        *[True] * 2,
    ]


def test_a_drafter_that_is_not_asked_gets_another_chance():
    """It was bad, but it is not given up: some hundred rounds later it is tried."""
    trust, asked = taught(own=False, guess=True), 0
    for round_ in range(1500):
        own = not trust.prefers(2)
        asked += own
        guess = RIGHT if round_ % 5 else WRONG
        trust.keep_draft([1], [Trial(WRONG if own else guess, guess, 2, own)])
        trust.learn([1, RIGHT])
    assert 1 <= asked <= 9


def test_nothing_is_learned_behind_a_wrong_token():
    """The guesses behind it were wrong, but nobody knows what came after it."""
    trust, behind = Trust(), Trial(WRONG, WRONG, 4, own=False)
    for _ in range(30):
        trust.keep_draft([1], [Trial(WRONG, None, 0, own=True), behind])
        trust.learn([1, RIGHT, RIGHT])
    assert trust.prefers(4)


def test_a_draft_counts_once():
    trust = Trust()
    trust.keep_draft([1], [Trial(RIGHT, WRONG, 4, own=True)])
    trust.learn([1, RIGHT])
    once = list(trust._rates[4][1].trials)
    trust.learn([1, RIGHT])
    assert trust._rates[4][1].trials == once == [1.0]


@pytest.mark.parametrize("gone", ["another sequence", "withdrawn tokens"])
def test_another_text_is_not_compared(gone):
    trust = Trust()
    for _ in range(30):
        trust.keep_draft([1, 2], [Trial(WRONG, WRONG, 4, own=False)])
        if gone == "another sequence":
            trust.begin()
        trust.learn([1, 3, RIGHT] if gone == "withdrawn tokens" else [1, 2, RIGHT])
    assert trust.prefers(4)
