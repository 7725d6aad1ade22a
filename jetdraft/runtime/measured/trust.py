"""Learns when a guess that costs nothing is better than the drafter's own token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jetdraft.runtime.measured.rates import Acceptance, Streak, prior


class Trial(NamedTuple):
    """A drafted token, and what was guessed in its place.

    token     the token that was drafted
    guess     the token that was guessed there, taken or not; None without a guess
    evidence  what the guess rests on, see `Proposer.evidence`
    own       whether the drafter chose the drafted token

        Trial(token=3, guess=4, evidence=2, own=True)
    """

    token: int
    guess: int | None
    evidence: int
    own: bool


class Trust:
    """How often guesses are right, and the drafter's own tokens in the same places.

    Both have a rate for each evidence. A guess that was not taken counts too: the
    target's text tells whether it would have been right. The drafter's token is not
    known where a guess was taken, so its rate fades to a hopeful prior, and it is asked
    again.

        trust = Trust()
        trust.drafted([5, 8, 9], [Trial(token=3, guess=4, evidence=2, own=True)])
        trust.learn([5, 8, 9, 4])    # the guess was right, the drafter was not
        trust.prefers(2)    # True
    """

    def __init__(self) -> None:
        self._rates: dict[int, tuple[Streak, Streak]] = {}
        self.begin()

    def begin(self) -> None:
        """Another sequence."""
        self._context, self._trials = list[int](), list[Trial]()

    def prefers(self, evidence: int) -> bool:
        """Whether guesses with this evidence are right more often than the drafter."""
        own, guess = self._streaks(evidence)
        return guess.rates(1)[0] > own.rates(1)[0]

    def drafted(self, context: Sequence[int], trials: Sequence[Trial]) -> None:
        """Keep the draft after a context until the target has spoken."""
        self._context, self._trials = list(context), list(trials)

    def learn(self, context: Sequence[int]) -> None:
        """Compare the last draft with what came, up to its first wrong token."""
        start, trials = len(self._context), self._trials
        self._trials = []
        if list(context[:start]) != self._context:
            return  # tokens were withdrawn, and the draft continued them
        for trial, token in zip(trials, context[start:], strict=False):
            if trial.guess is not None:
                own, guess = self._streaks(trial.evidence)
                guess.observe([trial.guess == token])
                if trial.own:
                    own.observe([trial.token == token])
                else:
                    own.fade()
            if trial.token != token:
                break

    def _streaks(self, evidence: int) -> tuple[Streak, Streak]:
        """The rates of the drafter and of guesses, where guesses have this evidence."""
        new = Streak(Acceptance.PRIOR), Streak(prior(evidence))
        return self._rates.setdefault(evidence, new)
