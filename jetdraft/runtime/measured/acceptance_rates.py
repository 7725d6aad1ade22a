"""Running estimates of how often drafted tokens are right, by place and by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jetdraft.runtime.measured.stats import Round

RankRates = Sequence[Sequence[float]]
"""For each depth, how often the best, the second, ... guess is right."""


class PositionRates:
    """Running estimates of the success rate at each position of a series of events.

    Each rate is an exponentially weighted share of successes; the prior is the rate of
    the position before. `RUN` failures in a row erase the earlier successes: at a rate
    of a third, such a run happens once in a hundred rounds.
    """

    WEIGHT = 1.0
    """How many trials the prior counts for."""

    MEMORY, FADING = 0.95, 0.99
    """The factors of the counts at a new event, and after a round without an event."""

    RUN = 12

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.successes: list[float] = []
        self.trials: list[float] = []
        self._failures_in_a_row: list[int] = []
        self._rounds_without = 0

    def fade(self) -> None:
        """Note a round without such events; the counts fade when they are needed."""
        self._rounds_without += 1

    def _apply_fading(self) -> None:
        """Multiply the counts by `FADING` for each round without events so far."""
        if self._rounds_without:
            left = self.FADING**self._rounds_without
            self.successes = [x * left for x in self.successes]
            self.trials = [x * left for x in self.trials]
            self._rounds_without = 0

    def observe(self, outcomes: Sequence[bool]) -> None:
        """Count the outcomes of one series of events, from position 0 on."""
        self._apply_fading()
        grow = len(outcomes) - len(self.trials)
        self.successes += [0.0] * grow
        self.trials += [0.0] * grow
        self._failures_in_a_row += [0] * grow
        for place, success in enumerate(outcomes):
            failures = 0 if success else self._failures_in_a_row[place] + 1
            self._failures_in_a_row[place] = failures
            if failures >= self.RUN:
                self.successes[place] = 0.0
                self.trials[place] = float(failures)
                continue
            self.successes[place] = self.successes[place] * self.MEMORY + success
            self.trials[place] = self.trials[place] * self.MEMORY + 1

    @property
    def reach(self) -> int:
        """The longest length to try: 2 (1 + the number of positions with successes)."""
        return 2 * (1 + sum(successes > 0 for successes in self.successes))

    def rates(self, length: int) -> list[float]:
        """The rate at each position below `length`, given successes before it."""
        self._apply_fading()
        rates, rate = [], self.prior
        counts = [*zip(self.successes, self.trials, strict=True)]
        counts += [(0.0, 0.0)] * (length - len(counts))
        for successes, trials in counts[:length]:
            rate = (successes + self.WEIGHT * rate) / (trials + self.WEIGHT)
            rates.append(rate)
        return rates


class Acceptance:
    """Running acceptance of one proposer's drafts, by position and by sibling.

    Each evidence has rates of its own, see `Proposer.evidence`: 1 starts at 0.5, 2 at
    0.75. The priors are hopeful, so that every proposer and branch is tried.
    """

    PRIOR = 0.9
    SIBLING_PRIOR = 0.3

    def __init__(self) -> None:
        self.places = PositionRates(self.PRIOR)
        self.by_evidence: dict[int, PositionRates] = {}
        # A success is a wrong sibling: the series of siblings ends with the right one.
        self.siblings = PositionRates(1.0 - self.SIBLING_PRIOR)

    @property
    def reach(self) -> int | None:
        """The longest draft to ask for; None where rates depend on evidence."""
        return None if self.by_evidence else self.places.reach

    def fade(self) -> None:
        """Let the rates fade after a round without a draft of this proposer."""
        for streak in (self.places, self.siblings, *self.by_evidence.values()):
            streak.fade()

    def observe(self, round_: Round) -> None:
        """Count what a round accepted of its draft, by depth, evidence and sibling."""
        outcomes = [rank == 0 for rank, _ in round_.ranks]
        self.places.observe(outcomes)
        if round_.evidence:
            self._evidence_rates(round_.evidence).observe(outcomes)
        for rank, count in round_.ranks:
            if rank and count > 1:
                right_sibling = [False] if rank < count else []
                self.siblings.observe([True] * (rank - 1) + right_sibling)

    def rates(self, length: int, evidence: int | None = 0) -> list[float]:
        """The rates of first siblings at depths 1..length, given right ancestors.

        They hold for drafts with this evidence; None is for a draft that is not made
        yet: where evidence differs, it may be the best.
        """
        if evidence:
            return self._evidence_rates(evidence).rates(length)
        if evidence is None and self.by_evidence:
            return [1.0] * length
        return self.places.rates(length)

    def _evidence_rates(self, evidence: int) -> PositionRates:
        """The rates of drafts with this evidence, made at the first call."""
        return self.by_evidence.setdefault(evidence, PositionRates(prior_of(evidence)))

    def sibling_shares(self, count: int) -> list[float]:
        """How often sibling 2, 3, ... is right where the first sibling is wrong."""
        all_wrong, shares = 1.0, []
        for wrong in self.siblings.rates(count):
            shares.append(all_wrong * (1.0 - wrong))
            all_wrong *= wrong
        return shares


def prior_of(evidence: int) -> float:
    """The acceptance rate to expect of drafts with this evidence: 0.5, 0.75, ..."""
    return float(1.0 - 0.5**evidence)


class GuessRates:
    """How often guesses are right, by depth and rank; the rates begin at `priors`.

    A guess is compared with the text whether it was drafted or not.
    """

    WEIGHT = 40.0
    """How many guesses the priors count for."""

    MEMORY = 0.995

    def __init__(self, priors: RankRates) -> None:
        self._priors = [list(rates) for rates in priors]
        self.forget()

    def forget(self) -> None:
        self.settled = 0
        """How many guesses were compared with the text."""
        self._trials = [self.WEIGHT] * len(self._priors)
        self._hits = [[self.WEIGHT * r for r in rates] for rates in self._priors]
        self._waiting: dict[int, list[tuple[int, list[int]]]] = {}

    def begin(self) -> None:
        """Start another text: drop the guesses not compared yet, keep the rates."""
        self._waiting = {}

    def add_guesses(self, guesses: Mapping[int, Sequence[int]]) -> None:
        """Add guesses by position in the text, best first; the first has depth 0."""
        for depth, (place, tokens) in enumerate(guesses.items()):
            self._waiting.setdefault(place, []).append((depth, list(tokens)))

    def compare(self, first: int, tokens: Sequence[int]) -> None:
        """Compare guesses with the text's `tokens`, from position `first` on."""
        for place, token in enumerate(tokens, first):
            for depth, guessed in self._waiting.pop(place, []):
                rank = guessed.index(token) if token in guessed else -1
                self.settled += 1
                self._trials[depth] = self._trials[depth] * self.MEMORY + 1
                self._hits[depth] = [
                    hits * self.MEMORY + (of_rank == rank)
                    for of_rank, hits in enumerate(self._hits[depth])
                ]

    @property
    def ranks(self) -> list[list[float]]:
        """The rate of each rank at each depth, best guess first."""
        return [
            [hits / trials for hits in of_ranks]
            for of_ranks, trials in zip(self._hits, self._trials, strict=True)
        ]
