"""Chooses the pruning threshold that pays most, by what earlier rounds have shown."""

from __future__ import annotations

from collections.abc import Callable

CHOICES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""The thresholds: a drafted row stays if its probability is at least this."""


class Threshold:
    """Picks from `CHOICES` what would have committed most tokens per second.

    A round that pruned at one threshold shows what any higher threshold would have
    kept, committed and cost. Every `REFRESH` rounds a round keeps all rows, to show
    this for the lower thresholds too.

        threshold = Threshold()
        used = threshold.choose()
        threshold.observe(used, lambda higher: (tokens, milliseconds))
    """

    MEMORY = 0.97
    REFRESH = 16

    def __init__(self) -> None:
        self._tokens = [0.0] * len(CHOICES)
        self._ms = [1e-9] * len(CHOICES)
        self._rounds = 0

    def choose(self) -> float:
        """The threshold of the next round."""
        self._rounds += 1
        if self._rounds % self.REFRESH == 1:
            return CHOICES[0]
        values = [t / ms for t, ms in zip(self._tokens, self._ms, strict=True)]
        return CHOICES[values.index(max(values))]

    def observe(
        self, used: float, outcome: Callable[[float], tuple[float, float]]
    ) -> None:
        """Learn from a round that pruned at `used`.

        `outcome` gives the tokens and milliseconds that the round would have had with
        the same or a higher threshold.
        """
        for index, threshold in enumerate(CHOICES):
            if threshold >= used:
                tokens, ms = outcome(threshold)
                self._tokens[index] = self._tokens[index] * self.MEMORY + tokens
                self._ms[index] = self._ms[index] * self.MEMORY + ms
