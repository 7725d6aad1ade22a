"""Running estimates of how often guesses of tokens ahead are right, by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Ranks = Sequence[Sequence[float]]
"""For each depth, how often the best, the second, ... guess is right."""


class GuessRates:
    """Rates that begin at `priors` and follow what the text turned out to be.

    Held-out text says little of a text that repeats itself, or of another topic. A
    guess is compared with the token that the text has in its place, whether it was
    drafted or not: so ranks that no draft has are learned too.

        rates = GuessRates([[0.2, 0.1]])
        rates.guess({40: [7, 3]})     # in place 40 comes 7, or else 3
        rates.see(40, [3, 9])         # the text's tokens from place 40 on
        rates.ranks                   # [[0.195, 0.122]]
    """

    WEIGHT = 40.0
    """The places that the priors count for."""

    MEMORY = 0.995

    def __init__(self, priors: Ranks) -> None:
        self._priors = [list(rates) for rates in priors]
        self.forget()

    def forget(self) -> None:
        """Return to the priors."""
        self.settled = 0
        """The places of the text that were compared with a guess."""
        self._trials = [self.WEIGHT] * len(self._priors)
        self._hits = [[self.WEIGHT * r for r in rates] for rates in self._priors]
        self._waiting: dict[int, list[tuple[int, list[int]]]] = {}

    def begin(self) -> None:
        """Start another text; what was learned stays."""
        self._waiting = {}

    def guess(self, guesses: Mapping[int, Sequence[int]]) -> None:
        """Remember the guesses for some places, the best first; the nearest place is
        that of depth 0."""
        for depth, (place, tokens) in enumerate(guesses.items()):
            self._waiting.setdefault(place, []).append((depth, list(tokens)))

    def see(self, first: int, tokens: Sequence[int]) -> None:
        """Compare what was guessed with tokens of the text, from place `first` on."""
        for place, token in enumerate(tokens, first):
            for depth, guessed in self._waiting.pop(place, []):
                self._settle(depth, guessed, token)

    def _settle(self, depth: int, guessed: list[int], token: int) -> None:
        rank = guessed.index(token) if token in guessed else -1
        self.settled += 1
        self._trials[depth] = self._trials[depth] * self.MEMORY + 1
        self._hits[depth] = [
            hits * self.MEMORY + (place == rank)
            for place, hits in enumerate(self._hits[depth])
        ]

    @property
    def ranks(self) -> list[list[float]]:
        """The rates of each depth, best guess first."""
        return [
            [hits / trials for hits in of_ranks]
            for of_ranks, trials in zip(self._hits, self._trials, strict=True)
        ]
