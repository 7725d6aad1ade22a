"""How many rows a round is worth, zero included, and who proposes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jetdraft.runtime.probes import Probing
from jetdraft.runtime.proposers import Proposer
from jetdraft.runtime.stats import Round


@dataclass(frozen=True)
class Plan:
    """Ask `proposer` for `budget` rows; None means a round without a draft.

    The round's pass carries the probes of `probing`, for the next one.
    """

    proposer: Proposer | None
    budget: int
    probing: Probing = Probing()


PLAIN = Plan(None, 0)

WIDEST = 16
"""Rows of the widest pass that a controller plans."""

MARGIN = 1.02
"""A longer draft must promise this much more: its rates rest on less evidence."""

NEGLIGIBLE = 0.01
"""A draft token that is right this seldom is not worth planning for."""


LEAST_PROBE_MS = 1e-3
"""From nothing an estimate could not grow again."""


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


@dataclass
class Costs:
    """Milliseconds: `target[w]` of a pass of w rows, `draft[name]` per drafted token.

    `probe` is what a probe adds to a pass. Widths between measured ones are
    interpolated, beyond them extrapolated.
    """

    target: dict[int, float]
    draft: dict[str, float]
    probe: float = 0.0

    def pass_ms(self, width: int) -> float:
        """The target's pass time at `width`."""
        if width in self.target:
            return self.target[width]
        below = [w for w in self.target if w < width]
        above = [w for w in self.target if w > width]
        if below and above:
            low, high = max(below), min(above)
        elif len(self.target) > 1:
            low, high = sorted(self.target)[-2:] if below else sorted(self.target)[:2]
        else:
            return next(iter(self.target.values()))
        slope = (self.target[high] - self.target[low]) / (high - low)
        return self.target[low] + slope * (width - low)

    def learn(self, round_: Round) -> None:
        """Follow the machine slowly; a single stall says little."""
        if round_.probes:
            added = round_.target_seconds * 1e3 - self.pass_ms(round_.width)
            each = max(added / round_.probes, LEAST_PROBE_MS)
            self.probe = _follow(max(self.probe, LEAST_PROBE_MS), each)
        elif round_.width in self.target:
            self.target[round_.width] = _follow(
                self.target[round_.width], round_.target_seconds * 1e3
            )
        if round_.drafted and round_.method in self.draft:
            self.draft[round_.method] = _follow(
                self.draft[round_.method], round_.draft_seconds * 1e3 / round_.drafted
            )


def _follow(known: float, seen: float) -> float:
    return known + 0.05 * (min(seen, 1.5 * known) - known)


class Acceptance:
    """Running chances that the draft's token at each position is right.

    Exponentially weighted counts beside a weak prior: a position takes after the one
    before it until it has been seen, and what is not seen again fades to the prior.
    The prior is hopeful, so that every proposer gets its chance, now and then again.
    """

    PRIOR = 0.9
    WEIGHT = 2.0
    MEMORY = 0.97
    FADING = 0.99

    def __init__(self) -> None:
        self.accepted: list[float] = []
        self.evaluated: list[float] = []

    def fade(self) -> None:
        """A round passed in which this proposer was not asked."""
        self.accepted = [x * self.FADING for x in self.accepted]
        self.evaluated = [x * self.FADING for x in self.evaluated]

    def observe(self, evaluated: int, accepted: int) -> None:
        """Count one draft."""
        grow = evaluated - len(self.evaluated)
        self.accepted += [0.0] * grow
        self.evaluated += [0.0] * grow
        for position in range(evaluated):
            self.accepted[position] *= self.MEMORY
            self.evaluated[position] *= self.MEMORY
            self.accepted[position] += position < accepted
            self.evaluated[position] += 1

    def rates(self, length: int) -> list[float]:
        """The estimated rate at positions 0..length-1."""
        rates, prior = [], self.PRIOR
        for position in range(length):
            seen = position < len(self.evaluated)
            accepted = self.accepted[position] if seen else 0.0
            evaluated = self.evaluated[position] if seen else 0.0
            prior = (accepted + self.WEIGHT * prior) / (evaluated + self.WEIGHT)
            rates.append(prior)
        return rates


class _Promise(NamedTuple):
    """A draft: what a round with it commits, the chance that all of it is right."""

    length: int
    tokens: float
    chance: float


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
    ) -> None:
        self.proposers = list(proposers)
        self.costs = costs
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
                spent = self._pass_ms(length + 1, probing) + length * each
                yield Plan(proposer, length, probing), promise, spent

    def _steady(self, proposer: Proposer) -> Iterator[_Steady]:
        """The ways to go on with a proposer's probes.

        Where only the last row carries streams, a wrong guess leaves the next round
        without a draft. With p the chance of a whole draft, T its tokens in t ms and a
        round without one in u ms, that gives (T + 1 - p) / (t + (1 - p) u) tokens per
        ms, and a draft at hand is worth (T - 1 - value (t - u)) / (2 - p) tokens.
        """
        limit = min(self.max_draft_tokens, proposer.streams)
        for length, tokens, chance in self._promises(proposer, limit):
            every, last = Probing(length), Probing(length, last_only=True)
            yield _Steady(every, tokens / self._pass_ms(length + 1, every), 0.0)
            whole, bare = self._pass_ms(length + 1, last), self._pass_ms(1, last)
            value = (tokens + 1 - chance) / (whole + (1 - chance) * bare)
            prepared = (tokens - 1 - value * (whole - bare)) / (2 - chance)
            yield _Steady(last, value, prepared)

    def _promises(self, proposer: Proposer, limit: int) -> Iterator[_Promise]:
        """What drafts of 1, 2, ... tokens promise."""
        tokens = chance = 1.0
        rates = self.acceptance[proposer.name].rates(limit)
        for length, rate in enumerate(rates, start=1):
            chance *= rate
            if chance < NEGLIGIBLE:
                break
            tokens += chance
            yield _Promise(length, tokens, chance)

    def _pass_ms(self, rows: int, probing: Probing) -> float:
        """The time of a pass that holds `rows` rows and their probes."""
        probes = probing.of(rows).total if probing.streams else 0
        return self.costs.pass_ms(self.widths[rows]) + probes * self.costs.probe

    def observe(self, round_: Round) -> None:
        """Update rates and times."""
        self.costs.learn(round_)
        for name, acceptance in self.acceptance.items():
            if name == round_.method and round_.drafted:
                acceptance.observe(round_.evaluated, round_.accepted)
            else:
                acceptance.fade()
