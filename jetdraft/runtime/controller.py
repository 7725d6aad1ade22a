"""How many rows a round is worth, zero included, and who proposes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
        best, best_value = self._best(room, offers, Probing())
        for proposer in self.proposers:
            if proposer.streams:
                probing, value = self._steady(proposer)
                if value > MARGIN * best_value:
                    best, _ = self._best(room, offers, probing)
                    best_value = value
        return best

    def _best(
        self, room: int, offers: Mapping[Proposer, int], probing: Probing
    ) -> tuple[Plan, float]:
        """The best draft for a pass with those probes, and its tokens per ms."""
        best = Plan(None, 0, probing)
        best_value = 1.0 / self._pass_ms(1, probing)
        for proposer in self.proposers:
            if proposer.streams and not probing.streams:
                continue  # its drafts are not for free, see `_steady`
            limit = min(self.max_draft_tokens, _limit(proposer, room, offers))
            each = self.costs.draft.get(proposer.name, 0.0)
            for length, tokens in self._promises(proposer, limit):
                value = tokens / (self._pass_ms(length + 1, probing) + length * each)
                if value > MARGIN * best_value:
                    best, best_value = Plan(proposer, length, probing), value
        return best, best_value

    def _steady(self, proposer: Proposer) -> tuple[Probing, float]:
        """The probes that pay best in the long run, and the tokens per ms then.

        Where only the last row carries streams, a wrong guess leaves the next round
        without a draft.
        """
        best, best_value = Probing(), 0.0
        limit = min(self.max_draft_tokens, proposer.streams)
        for length, tokens in self._promises(proposer, limit):
            every, last = Probing(length), Probing(length, last_only=True)
            value = tokens / self._pass_ms(length + 1, every)
            if value > best_value:
                best, best_value = every, value
            wrong = 1.0 - self._chance(proposer, length)
            spent = self._pass_ms(length + 1, last) + wrong * self._pass_ms(1, last)
            value = (tokens + wrong) / spent
            if value > best_value:
                best, best_value = last, value
        return best, best_value

    def _promises(self, proposer: Proposer, limit: int) -> Iterator[tuple[int, float]]:
        """Draft lengths and the tokens that a round with such a draft commits."""
        tokens = chance = 1.0
        rates = self.acceptance[proposer.name].rates(limit)
        for length, rate in enumerate(rates, start=1):
            chance *= rate
            if chance < NEGLIGIBLE:
                break
            tokens += chance
            yield length, tokens

    def _chance(self, proposer: Proposer, length: int) -> float:
        """That a whole draft is right."""
        return math.prod(self.acceptance[proposer.name].rates(length))

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
