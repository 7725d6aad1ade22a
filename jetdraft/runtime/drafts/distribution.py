"""A distribution over some of the vocabulary's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jetdraft.runtime.drafts.noise import Doubles, Int64s, gumbel


@dataclass(frozen=True)
class Distribution:
    """`probabilities` float64 [m] of the token `ids` int64 [m]; all others have none.

    Distribution(np.array([3, 7]), np.array([0.9, 0.1])).draw(seed=1, position=40)
    """

    ids: Int64s
    probabilities: Doubles

    def draw(self, seed: int, position: int) -> int:
        """A token, by the Gumbel-max trick with the noise of that place."""
        return int(self.ids[np.argmax(self.scores(seed, position))])

    def scores(self, seed: int, position: int) -> Doubles:
        """Log probability plus noise, float64 [m]; the k best are k distinct draws."""
        with np.errstate(divide="ignore"):  # log 0 never wins
            logs = np.log(self.probabilities)
        return np.asarray(logs + gumbel(seed, np.array([position]), self.ids))

    def over(self, ids: Int64s) -> Doubles:
        """The probabilities of other `ids`, ascending and including these."""
        found = np.zeros(len(ids))
        found[np.searchsorted(ids, self.ids)] = self.probabilities
        return found
