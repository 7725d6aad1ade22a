"""How many rows a round is worth, zero included, and who proposes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jetdraft.best_tree import best_tree
from jetdraft.contract import WIDEST
from jetdraft.runtime.drafts.probes import Probing
from jetdraft.runtime.measured.curve import Costs
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.proposers import Proposer


@dataclass(frozen=True)
class Plan:
    """Ask `proposer` for `budget` rows; None means a round without a draft.

    `parents`, if given, says how they branch. The round's pass carries the probes of
    `probing`, for the next one.
    """

    proposer: Proposer | None
    budget: int
    probing: Probing = Probing()
    parents: tuple[int, ...] | None = None


PLAIN = Plan(None, 0)

MARGIN = 1.02
"""A longer draft must promise this much more: its rates rest on less evidence."""

NEGLIGIBLE = 0.01
"""A draft token that is right this seldom is not worth planning for."""

MOST_SIBLINGS = 3
"""Beside the first one, in trees that a controller plans."""


class Controller(Protocol):
    """Plans each round and learns from what came of it."""

    def plan(self, room: int, offers: Mapping[Proposer, int]) -> Plan:
        """The plan for a round with room for `room` drafted rows.

        `offers` has the rows that proposers asked in this round came up with, which
        may be fewer than asked for.
        """
        ...

    def observe(self, round_: Round) -> None:
        """A round ended."""
        ...


class Fixed:
    """Always the same proposer and draft length."""

    def __init__(self, proposer: Proposer | None, num_draft_tokens: int) -> None:
        self.proposer = proposer
        self.num_draft_tokens = num_draft_tokens

    def plan(self, room: int, offers: Mapping[Proposer, int]) -> Plan:
        """The fixed length, or what fits of it."""
        if self.proposer is None:
            return PLAIN
        probing = Probing(min(self.num_draft_tokens, self.proposer.streams))
        budget = min(self.num_draft_tokens, _limit(self.proposer, room, offers))
        if budget > 0:
            return Plan(self.proposer, budget, probing)
        return Plan(None, 0, probing)

    def observe(self, round_: Round) -> None:
        """Nothing to learn."""


def _limit(proposer: Proposer, room: int, offers: Mapping[Proposer, int]) -> int:
    """The longest draft that this round can get from a proposer."""
    return min(room, offers.get(proposer, proposer.max_draft_tokens))


class _Promise(NamedTuple):
    """A draft: what a round with it commits, the chance that all of it is right.

    `parents` says how it branches, None that it does not; `depth` how deep it goes.
    """

    length: int
    depth: int
    tokens: float
    chance: float
    parents: tuple[int, ...] | None = None


class _Steady(NamedTuple):
    """Going on with these probes: tokens per ms, and what a draft at hand is worth."""

    probing: Probing
    value: float
    prepared: float


class Adaptive:
    """Whichever proposer and length promises most committed tokens per second.

    A draft of K with rates a_1..a_K commits 1 + a_1 + a_1 a_2 + ... tokens (Leviathan
    et al., section 3) and costs a target pass of its width plus K drafted tokens. Off
    is a draft of none, at the narrowest of `widths`.

    With `branching`, proposers that can are asked for trees where those promise more:
    the rows that are most likely right, as far as a pass has room.

    Drafts that are read off probes cost their probes, one pass before. So what is
    compared are ways to go on: without probes, or with those that would pay in the
    long run.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        costs: Costs,
        acceptance: dict[str, Acceptance],
        widths: Sequence[int],
        max_draft_tokens: int,
        exact: bool = True,
        branching: bool = False,
    ) -> None:
        self.proposers = list(proposers)
        self.costs = costs
        self.exact = exact
        self.branching = branching
        # For each number of rows the narrowest allowed width that holds them.
        allowed = sorted(widths)
        self.widths = [
            next((w for w in allowed if w >= rows), rows) for rows in range(1 + WIDEST)
        ]
        self.max_draft_tokens = max_draft_tokens
        self.acceptance = acceptance

    def plan(self, room: int, offers: Mapping[Proposer, int]) -> Plan:
        """The best plan under the current estimates."""
        best, best_value = self._without_probes(room, offers)
        steady = None
        for proposer in self.proposers:
            for found in self._steady(proposer):
                if found.value > MARGIN * best_value:
                    steady, best_value = found, found.value
        return best if steady is None else self._with_probes(room, offers, steady)

    def _without_probes(
        self, room: int, offers: Mapping[Proposer, int]
    ) -> tuple[Plan, float]:
        """The draft that promises most tokens per ms, and how many."""
        best, best_value = PLAIN, 1.0 / self._pass_ms(1, Probing())
        for plan, promise, spent in self._plans(room, offers, Probing()):
            value = promise.tokens / spent
            if value > MARGIN * best_value:
                best, best_value = plan, value
        return best, best_value

    def _with_probes(
        self, room: int, offers: Mapping[Proposer, int], steady: _Steady
    ) -> Plan:
        """The draft that is worth most to someone who goes on like that.

        Time has the price of the tokens that it would bring in the long run, and being
        left with a draft for the next round has its worth too.
        """
        probing, best = steady.probing, Plan(None, 0, steady.probing)
        spent = self._pass_ms(1, probing)
        best_worth = 1.0 - steady.value * spent + steady.prepared
        for plan, promise, spent in self._plans(room, offers, probing):
            if probing.last_only and promise.parents is not None:
                continue  # the last row of a tree is seldom where it goes on
            chance = promise.chance if probing.last_only else 1.0
            worth = promise.tokens - steady.value * spent + chance * steady.prepared
            if worth > best_worth:
                best, best_worth = plan, worth
        return best

    def _plans(
        self, room: int, offers: Mapping[Proposer, int], probing: Probing
    ) -> Iterator[tuple[Plan, _Promise, float]]:
        """Every draft that this round could have, what it promises, and its ms."""
        for proposer in self.proposers:
            if proposer.streams and not probing.streams:
                continue  # its drafts are not for free, see `_steady`
            limit = min(self.max_draft_tokens, _limit(proposer, room, offers))
            each = self.costs.draft.get(proposer.name, 0.0)
            for promise in self._promises(proposer, limit):
                length = promise.length
                branches = promise.parents is not None
                spent = self._pass_ms(length + 1, probing, branches) + length * each
                yield Plan(proposer, length, probing, promise.parents), promise, spent

    def _steady(self, proposer: Proposer) -> Iterator[_Steady]:
        """The ways to go on with a proposer's probes.

        Where only the last row carries streams, a wrong guess leaves the next round
        without a draft. With p the chance of a whole draft, T its tokens in t ms and a
        round without one in u ms, that gives (T + 1 - p) / (t + (1 - p) u) tokens per
        ms, and a draft at hand is worth (T - 1 - value (t - u)) / (2 - p) tokens.
        """
        limit = min(self.max_draft_tokens, proposer.max_draft_tokens)
        for length, depth, tokens, chance, parents in (
            self._promises(proposer, limit) if proposer.streams else ()
        ):
            every, last = Probing(depth), Probing(depth, last_only=True)
            spent = self._pass_ms(length + 1, every, parents is not None)
            yield _Steady(every, tokens / spent, 0.0)
            if parents is not None:
                continue
            whole, bare = self._pass_ms(length + 1, last), self._pass_ms(1, last)
            value = (tokens + 1 - chance) / (whole + (1 - chance) * bare)
            prepared = (tokens - 1 - value * (whole - bare)) / (2 - chance)
            yield _Steady(last, value, prepared)

    def _promises(self, proposer: Proposer, limit: int) -> Iterator[_Promise]:
        """What chains of 1, 2, ... tokens promise, and what trees do."""
        tokens = chance = 1.0
        deepest = min(limit, proposer.streams or limit)
        rates = self.acceptance[proposer.name].rates(deepest)
        for length, rate in enumerate(rates, start=1):
            chance *= rate
            if chance < NEGLIGIBLE:
                break
            tokens += chance
            yield _Promise(length, length, tokens, chance)
        if self.branching and proposer.branches and rates:
            yield from self._trees(proposer, limit, rates)

    def _trees(
        self, proposer: Proposer, limit: int, rates: list[float]
    ) -> Iterator[_Promise]:
        """What the likeliest trees that fill a pass promise.

        In an exact generation a row off the first path is a guess that is run again:
        its worth is a token less the time of a row.
        """
        row = (self.costs.pass_ms(WIDEST) - self.costs.pass_ms(1)) / (WIDEST - 1)
        worth = 1.0 - row / self.costs.pass_ms(1) if self.exact else 1.0
        others = self.acceptance[proposer.name].shares(MOST_SIBLINGS)
        if worth * (1.0 - min(rates)) * others[0] < row / self.costs.pass_ms(1):
            return  # not even the best branch pays for its row
        parents, chances = best_tree(limit, rates, others)
        tokens, depths, on_first_path = 1.0, [0], [True]
        for index, (parent, chance) in enumerate(zip(parents, chances, strict=True)):
            depths.append(depths[parent] + 1)
            first = on_first_path[parent] and parent not in parents[:index]
            on_first_path.append(first)
            tokens += chance * (1.0 if first else worth)
            length = index + 1
            if length + 1 in self.widths and not all(on_first_path):
                yield _Promise(
                    length, max(depths), tokens, 0.0, tuple(parents[:length])
                )

    def _pass_ms(self, rows: int, probing: Probing, branches: bool = False) -> float:
        """The time of a pass that holds `rows` rows and their probes."""
        probes = probing.of(rows).total if probing.streams else 0
        width, extra = self.widths[rows], probes * self.costs.probe
        if branches:
            return extra + self.costs.tree_ms(width, self.exact)
        return extra + self.costs.pass_ms(width)

    def observe(self, round_: Round) -> None:
        """Update rates and times."""
        self.costs.learn(round_)
        for name, acceptance in self.acceptance.items():
            if name == round_.method and round_.drafted:
                acceptance.observe(round_)
            else:
                acceptance.fade()
