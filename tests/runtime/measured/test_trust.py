"""Guesses are preferred where they were right more often than a drafter."""

import pytest

from jetdraft.runtime.measured.trust import Trial, Trust

RIGHT, WRONG = 4, 5


def taught(own, guess, evidence=2, rounds=30):
    """After rounds of one token, in which both or either were right."""
    trust, context = Trust(), [1]
    for _ in range(rounds):
        trial = Trial(
            RIGHT if own else WRONG, RIGHT if guess else WRONG, evidence, True
        )
        trust.drafted(context, [trial])
        context = [*context, RIGHT]
        trust.learn(context)
    return trust


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("guess", [True, False])
def test_the_better_is_preferred(own, guess):
    assert taught(own, guess).prefers(2) == (guess and not own)


def test_each_evidence_has_a_rate_of_its_own():
    trust = taught(own=False, guess=False, evidence=1)
    assert not trust.prefers(1)
    assert trust.prefers(3), "nothing is known of it, and it is expected to be better"


def test_no_guess_is_never_preferred():
    assert not taught(own=False, guess=True).prefers(0)


def test_a_new_trust_begins_with_the_drafter():
    assert not any(Trust().prefers(evidence) for evidence in (1, 2, 3))


def test_nothing_is_learned_behind_a_wrong_token():
    trust, behind = Trust(), Trial(RIGHT, RIGHT, 4, own=False)
    for _ in range(30):
        trust.drafted([1], [Trial(WRONG, None, 0, own=True), behind])
        trust.learn([1, RIGHT, WRONG])
    assert trust.prefers(4), "its guess was wrong there, but nobody compares it"


def test_another_sequence_is_not_compared():
    trust = Trust()
    for _ in range(30):
        trust.drafted([1], [Trial(RIGHT, None, 0, own=True)])
        trust.begin()
        trust.learn([1, WRONG])
    assert not trust.prefers(3)
