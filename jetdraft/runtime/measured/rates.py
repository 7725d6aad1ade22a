"""Running estimates of how often drafted tokens are right."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.measured.stats import Round


class Streak:
    """Running estimates of the success rate at each position of a row of events.

    Each rate is an exponentially weighted share of successes with a weak prior: the
    rate of the position before it, and at the first position `prior`. The counts of a
    position that no round shows fade, so its rate returns to the prior. `RUN` failures
    in a row erase the earlier successes: a rate of a third would show such a run once
    in a hundred rounds.
    """

    WEIGHT = 1.0
    MEMORY = 0.95
    FADING = 0.99
    RUN = 12

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.well: list[float] = []
        self.seen: list[float] = []
        self._failed: list[int] = []

    def fade(self) -> None:
        """A round passed that shows nothing of these events."""
        self.well = [x * self.FADING for x in self.well]
        self.seen = [x * self.FADING for x in self.seen]

    def observe(self, went_well: Sequence[bool]) -> None:
        """Count the outcomes of one row of events, from position 0 on."""
        grow = len(went_well) - len(self.seen)
        self.well += [0.0] * grow
        self.seen += [0.0] * grow
        self._failed += [0] * grow
        for place, well in enumerate(went_well):
            self._failed[place] = 0 if well else self._failed[place] + 1
            if self._failed[place] >= self.RUN:
                self.well[place] = 0.0
                self.seen[place] = float(self._failed[place])
                continue
            self.well[place] = self.well[place] * self.MEMORY + well
            self.seen[place] = self.seen[place] * self.MEMORY + 1

    def rates(self, length: int) -> list[float]:
        """The rates at positions 0..length-1, each given that all before went well."""
        rates, rate = [], self.prior
        for place in range(length):
            counted = place < len(self.seen)
            well = self.well[place] if counted else 0.0
            seen = self.seen[place] if counted else 0.0
            rate = (well + self.WEIGHT * rate) / (seen + self.WEIGHT)
            rates.append(rate)
        return rates


class Acceptance:
    """Running acceptance of one proposer's drafts, by position and by sibling.

    Where a draft branches, the second sibling may be right where the first is wrong,
    and so on. Both priors are hopeful, so that every proposer and every branch is
    tried, and is tried again later.
    """

    PRIOR = 0.9
    SIBLING_PRIOR = 0.3

    def __init__(self) -> None:
        self.places = Streak(self.PRIOR)
        # An event goes well if one more sibling is wrong: then the row goes on.
        self.siblings = Streak(1.0 - self.SIBLING_PRIOR)

    def fade(self) -> None:
        """A round passed without a draft of this proposer."""
        self.places.fade()
        self.siblings.fade()

    def observe(self, round_: Round) -> None:
        """Count one draft."""
        self.places.observe([rank == 0 for rank, _ in round_.ranks])
        for rank, count in round_.ranks:
            if rank and count > 1:
                right = [False] if rank < count else []
                self.siblings.observe([True] * (rank - 1) + right)

    def rates(self, length: int) -> list[float]:
        """The rates of first siblings at depths 1..length, given right ancestors."""
        return self.places.rates(length)

    def shares(self, count: int) -> list[float]:
        """The rate of each further sibling where the first is wrong."""
        left, shares = 1.0, []
        for wrong in self.siblings.rates(count):
            shares.append(left * (1.0 - wrong))
            left *= wrong
        return shares
