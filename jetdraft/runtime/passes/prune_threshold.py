"""The pruning threshold that pays most, from what the rounds have shown."""

from __future__ import annotations

from collections.abc import Callable

CHOICES = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Probabilities that a drafted row needs to be kept."""


class Threshold:
    """Which of `CHOICES` would have committed most tokens per second.

    A round that pruned at one threshold shows what any higher one would have kept,
    committed and cost. Now and then a round keeps all, to show the lower ones too.

        threshold = Threshold()
        used = threshold.choose()
        threshold.observe(used, lambda least: (tokens, milliseconds))
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
        self, used: float, would: Callable[[float], tuple[float, float]]
    ) -> None:
        """A round pruned at `used`; `would` gives tokens and ms of a higher one."""
        for index, least in enumerate(CHOICES):
            if least >= used:
                tokens, ms = would(least)
                self._tokens[index] = self._tokens[index] * self.MEMORY + tokens
                self._ms[index] = self._ms[index] * self.MEMORY + ms
