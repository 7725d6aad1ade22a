"""Learns when a guess that costs nothing is better than the drafter's own token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetdraft.runtime.measured.rates import Acceptance, Streak


class Trial(NamedTuple):
    """A drafted token, the guess in its place if there was a guess, and its evidence.

    `own` says whether the drafter chose the token.
    """

    token: int
    guess: int | None
    evidence: int
    own: bool


class Trust:
    """How often guesses with some evidence are right, and the drafter's own tokens.

    A guess is tried in its place though the drafter's token was taken: the target's
    text tells whether it would have been right.

        trust = Trust()
        trust.drafted([5, 8, 9], [Trial(token=3, guess=4, evidence=2, own=True)])
        trust.learn([5, 8, 9, 4])    # the guess was right, the drafter was not
        trust.prefers(2)    # True
    """

    def __init__(self) -> None:
        self._own = Streak(Acceptance.PRIOR)
        self._guesses = Acceptance()
        self.begin()

    def begin(self) -> None:
        """Another sequence."""
        self._trials: list[Trial] = []
        self._start = 0

    def prefers(self, evidence: int) -> bool:
        """Whether guesses with this evidence are right more often than the drafter."""
        guess = self._guesses.rates(1, evidence)[0]
        return evidence > 0 and guess > self._own.rates(1)[0]

    def drafted(self, context: Sequence[int], trials: Sequence[Trial]) -> None:
        """Keep the draft after a context until the target has spoken."""
        self._start, self._trials = len(context), list(trials)

    def learn(self, context: Sequence[int]) -> None:
        """Compare the last draft with what came, up to its first wrong token."""
        for trial, token in zip(self._trials, context[self._start :], strict=False):
            if trial.own:
                self._own.observe([trial.token == token])
            if trial.guess is not None:
                self._guesses.streak(trial.evidence).observe([trial.guess == token])
            if trial.token != token:
                break
