"""Whether a drafter's new weights are better, by what the target accepts of them."""

from __future__ import annotations

import math
from collections import deque

WINDOW = 256
"""Evaluated tokens of a verdict, before the new weights and with them."""

EARLY = 64
"""Evaluated tokens after which a clear loss ends a trial."""

CLEAR = 3.0
"""A loss of so many standard errors is clear: chance brings it in one look of 700.
A trial has several looks: with texts of 16 tokens one trial in 170 ends by chance."""


class Tally:
    """Accepted and evaluated drafted tokens of the latest generations.

    Generations that are not needed for `WINDOW` evaluated tokens are forgotten.

        tally = Tally()
        tally.add(accepted=60, evaluated=100)
        tally.rate    # 0.6
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        self.accepted = self.evaluated = 0

    def add(self, accepted: int, evaluated: int) -> None:
        """Count a generation."""
        self._counts.append((accepted, evaluated))
        self.accepted += accepted
        self.evaluated += evaluated
        while self.evaluated - self._counts[0][1] >= WINDOW:
            accepted, evaluated = self._counts.popleft()
            self.accepted -= accepted
            self.evaluated -= evaluated

    @property
    def is_full(self) -> bool:
        """Whether there are enough tokens for a verdict."""
        return self.evaluated >= WINDOW

    @property
    def rate(self) -> float:
        """Accepted / evaluated tokens."""
        return self.accepted / max(1, self.evaluated)


def is_better(before: Tally, after: Tally) -> bool | None:
    """Whether the weights of `after` are kept; None while that is open.

    They go if their rate is lower: at `EARLY` tokens if it is lower by `CLEAR` standard
    errors of the difference, at `WINDOW` tokens in any case. At a rate of one half the
    standard error is then 0.044: weights that are as good as those before go every
    second time, and weights that are worse by that much stay one time in six.
    """
    if after.evaluated < EARLY:
        return None
    if after.is_full:
        return after.rate >= before.rate
    pooled = (before.accepted + after.accepted) / (before.evaluated + after.evaluated)
    variance = pooled * (1 - pooled) * (1 / before.evaluated + 1 / after.evaluated)
    loss = before.rate - after.rate
    return False if loss > CLEAR * math.sqrt(variance) else None
