"""How often drafts turned out right, as far as that tells what they will do."""

from __future__ import annotations

from collections.abc import Sequence

from jetdraft.runtime.measured.stats import Round


class Streak:
    """Running chances that the next of a row of events goes well, and the next.

    Exponentially weighted counts beside a weak prior: a place takes after the one
    before it until it has been seen, and what is not seen again fades to the prior.
    A run of failures that the counts cannot explain wipes out the successes before it:
    a rate of a third has one of `RUN` in a hundred rounds.
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
        """A round passed that tells nothing."""
        self.well = [x * self.FADING for x in self.well]
        self.seen = [x * self.FADING for x in self.seen]

    def observe(self, went_well: Sequence[bool]) -> None:
        """How the events of one row went, from place 0 on."""
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
        """The estimated chances at places 0..length-1, each after those before it."""
        rates, rate = [], self.prior
        for place in range(length):
            known = place < len(self.seen)
            well = self.well[place] if known else 0.0
            seen = self.seen[place] if known else 0.0
            rate = (well + self.WEIGHT * rate) / (seen + self.WEIGHT)
            rates.append(rate)
        return rates


class Acceptance:
    """Running chances that a proposer's token at each place of its draft is right.

    Where a draft branches, also that the second sibling is where the first is not, and
    so on. Both priors are hopeful, so that every proposer and every branch gets its
    chance, now and then again.
    """

    PRIOR = 0.9
    SIBLING_PRIOR = 0.3

    def __init__(self) -> None:
        self.places = Streak(self.PRIOR)
        # Counted as going well is that one more sibling is wrong: then a row goes on.
        self.siblings = Streak(1.0 - self.SIBLING_PRIOR)

    def fade(self) -> None:
        """A round passed in which this proposer was not asked."""
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
        """That the first sibling is right at depths 1..length, those above it right."""
        return self.places.rates(length)

    def shares(self, count: int) -> list[float]:
        """How often each further sibling is right when the first is wrong."""
        left, shares = 1.0, []
        for wrong in self.siblings.rates(count):
            shares.append(left * (1.0 - wrong))
            left *= wrong
        return shares
