"""A probability distribution over some of the vocabulary's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jetdraft.runtime.drafts.arrays import Float64s, Int64s
from jetdraft.runtime.drafts.noise import gumbel


@dataclass(frozen=True)
class Distribution:
    """The `probabilities` float64 [m] of the tokens `ids` int64 [m]; others have 0.

    Distribution(np.array([3, 7]), np.array([0.9, 0.1])).draw(seed=1, position=40)
    """

    ids: Int64s
    probabilities: Float64s

    def draw(self, seed: int, position: int) -> int:
        """One token by the Gumbel-max trick; the same seed and position repeat it."""
        return int(self.ids[np.argmax(self.scores(seed, position))])

    def scores(self, seed: int, position: int) -> Float64s:
        """Log probability plus noise, float64 [m]; the k best are k distinct draws."""
        with np.errstate(divide="ignore"):  # log 0 never wins
            logs = np.log(self.probabilities)
        return np.asarray(logs + gumbel(seed, np.array([position]), self.ids))

    def over(self, ids: Int64s) -> Float64s:
        """The probabilities of `ids`, ascending ids that include all of its own."""
        probabilities = np.zeros(len(ids))
        probabilities[np.searchsorted(ids, self.ids)] = self.probabilities
        return probabilities
