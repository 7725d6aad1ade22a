"""How many rows a round is worth, none included, and who proposes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jetdraft.best_tree import best_tree
from jetdraft.contract import WIDEST
from jetdraft.runtime.drafts.probes import NO_PROBING, Probing
from jetdraft.runtime.measured.curve import Curve
from jetdraft.runtime.measured.rates import Acceptance
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.proposers.proposer import Proposer


@dataclass(frozen=True)
class Assignment:
    """Ask `proposer` for `budget` rows; None means a round without a draft.

    `parents` asks for a tree of that shape. The round's pass carries the probes of
    `probing`, whose answers are drafts of the next round.
    """

    proposer: Proposer | None
    budget: int
    probing: Probing = NO_PROBING
    parents: tuple[int, ...] | None = None


PLAIN = Assignment(None, 0)

MARGIN = 1.02
"""A longer draft must promise this much more: its rates rest on less evidence."""

NEGLIGIBLE = 0.01
"""Drafted tokens with a smaller chance of being right are not planned."""

MOST_SIBLINGS = 3
"""Siblings beside the first one, in trees that a controller plans."""


class Controller(Protocol):
    """Assigns the draft of each round and learns from the round."""

    def assign(self, room: int, offers: Mapping[Proposer, int]) -> Assignment:
        """The draft of a round with room for `room` drafted rows.

        `offers` counts the rows that proposers offered in this round already; a
        proposer may offer fewer rows than it was asked for.
        """
        ...

    def observe(self, round_: Round) -> None:
        """Learn from a round that ended."""
        ...


class Fixed:
    """Always the same proposer and draft length."""

    def __init__(self, proposer: Proposer | None, num_draft_tokens: int) -> None:
        self.proposer = proposer
        self.num_draft_tokens = num_draft_tokens

    def assign(self, room: int, offers: Mapping[Proposer, int]) -> Assignment:
        """The fixed length, or as much of it as fits."""
        if self.proposer is None:
            return PLAIN
        probing = Probing(min(self.num_draft_tokens, self.proposer.traits.probes))
        budget = min(self.num_draft_tokens, _limit(self.proposer, room, offers))
        if budget > 0:
            return Assignment(self.proposer, budget, probing)
        return Assignment(None, 0, probing)

    def observe(self, round_: Round) -> None:
        """Nothing to learn."""


def _limit(proposer: Proposer, room: int, offers: Mapping[Proposer, int]) -> int:
    """The longest draft that this round can get from a proposer."""
    return min(room, offers.get(proposer, proposer.traits.max_draft_tokens))


class _Promise(NamedTuple):
    """A possible draft of `length` rows, `depth` deep, and what it promises.

    tokens   the expected tokens that a round with it commits
    chance   the chance that the whole draft is right
    parents  the shape of a tree; None for a chain
    """

    length: int
    depth: int
    tokens: float
    chance: float
    parents: tuple[int, ...] | None = None


class _Steady(NamedTuple):
    """A way to go on round after round with the same probes.

    value     its expected tokens per millisecond
    prepared  the tokens that a draft at hand is worth at the start of a round
    """

    probing: Probing
    value: float
    prepared: float


class Adaptive:
    """Picks the proposer and length that promise most committed tokens per second.

        a_i      the rate of draft position i, K the length, t(w) the time of a pass
        tokens = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K     (Leviathan et al., section 3)
        spent  = t(K + 1) + K times the time of a drafted token
        choose the draft with the largest tokens / spent; no draft is K = 0

    With `branching`, proposers that branch are asked for trees where trees promise
    more: the rows that are most likely right, as many as a pass holds.

    Probes cost time one pass before their draft is used. So the controller compares
    ways to go on round after round: without probes, or with the probes that would pay
    in the long run.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        curve: Curve,
        acceptance: dict[str, Acceptance],
        widths: Sequence[int],
        max_draft_tokens: int,
        exact: bool = True,
        branching: bool = False,
    ) -> None:
        self.proposers = list(proposers)
        self.curve = curve
        self.exact = exact
        self.branching = branching
        # widths[n] is the narrowest allowed width that holds n rows.
        allowed = sorted(widths)
        self.widths = [
            next((w for w in allowed if w >= rows), rows) for rows in range(1 + WIDEST)
        ]
        self.max_draft_tokens = max_draft_tokens
        self.acceptance = acceptance

    def assign(self, room: int, offers: Mapping[Proposer, int]) -> Assignment:
        """The best draft under the current estimates."""
        best, best_value = self._without_probes(room, offers)
        chosen = None
        for proposer in self.proposers:
            for steady in self._steady(proposer):
                if steady.value > MARGIN * best_value:
                    chosen, best_value = steady, steady.value
        return best if chosen is None else self._with_probes(room, offers, chosen)

    def _without_probes(
        self, room: int, offers: Mapping[Proposer, int]
    ) -> tuple[Assignment, float]:
        """The draft that promises most tokens per ms, and that value."""
        best, best_value = PLAIN, 1.0 / self._pass_ms(1, NO_PROBING)
        for draft, promise, spent in self._drafts(room, offers, NO_PROBING):
            value = promise.tokens / spent
            if value > MARGIN * best_value:
                best, best_value = draft, value
        return best, best_value

    def _with_probes(
        self, room: int, offers: Mapping[Proposer, int], steady: _Steady
    ) -> Assignment:
        """The draft of this round that is worth most if the next rounds go on so.

            worth = tokens - value * spent + chance * prepared

        Time is paid with the tokens that it would bring in the long run (`value`), and
        with that chance the next round starts with a draft at hand (`prepared`).
        """
        probing, best = steady.probing, Assignment(None, 0, steady.probing)
        spent = self._pass_ms(1, probing)
        best_worth = 1.0 - steady.value * spent + steady.prepared
        for draft, promise, spent in self._drafts(room, offers, probing):
            if probing.last_only and promise.parents is not None:
                continue  # the accepted path seldom ends at the last row of a tree
            chance = promise.chance if probing.last_only else 1.0
            worth = promise.tokens - steady.value * spent + chance * steady.prepared
            if worth > best_worth:
                best, best_worth = draft, worth
        return best

    def _drafts(
        self, room: int, offers: Mapping[Proposer, int], probing: Probing
    ) -> Iterator[tuple[Assignment, _Promise, float]]:
        """Every draft that this round could have, its promise, and its milliseconds."""
        for proposer in self.proposers:
            traits = proposer.traits
            if traits.probes and not probing.streams:
                continue  # its drafts cost probes, see `_steady`
            limit = min(self.max_draft_tokens, _limit(proposer, room, offers))
            token_ms = self.curve.drafts.get(traits.name, 0.0)
            for promise in self._promises(proposer, limit):
                length = promise.length
                branches = promise.parents is not None
                spent = self._pass_ms(length + 1, probing, branches) + length * token_ms
                draft = Assignment(proposer, length, probing, promise.parents)
                yield draft, promise, spent

    def _steady(self, proposer: Proposer) -> Iterator[_Steady]:
        """The ways to go on with a proposer's probes.

        If every row carries probes, each round has a draft. If only the last row does,
        a wrong token leaves the next round without a draft:

            p  the chance that a draft is right as a whole
            T  the tokens of a round with a draft, t its milliseconds
            u  the milliseconds of a round without a draft, which commits 1 token
            value    = (T + 1 - p) / (t + (1 - p) u)
            prepared = (T - 1 - value (t - u)) / (2 - p)
        """
        if not proposer.traits.probes:
            return
        limit = min(self.max_draft_tokens, proposer.traits.max_draft_tokens)
        for length, depth, tokens, chance, parents in self._promises(proposer, limit):
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
        """The promises of chains of 1, 2, ... tokens, and of trees."""
        tokens = chance = 1.0
        traits = proposer.traits
        deepest = min(limit, traits.probes or limit)
        rates = self.acceptance[traits.name].rates(deepest)
        for length, rate in enumerate(rates, start=1):
            chance *= rate
            if chance < NEGLIGIBLE:
                break
            tokens += chance
            yield _Promise(length, length, tokens, chance)
        if self.branching and traits.branches and rates:
            yield from self._trees(proposer, limit, rates)

    def _trees(
        self, proposer: Proposer, limit: int, rates: list[float]
    ) -> Iterator[_Promise]:
        """The promises of the likeliest trees that fill a pass.

        In an exact generation an accepted row off the first path is run again, so it is
        worth a token less the time of a row.
        """
        row = (self.curve.pass_ms(WIDEST) - self.curve.pass_ms(1)) / (WIDEST - 1)
        worth = 1.0 - row / self.curve.pass_ms(1) if self.exact else 1.0
        others = self.acceptance[proposer.traits.name].shares(MOST_SIBLINGS)
        if worth * (1.0 - min(rates)) * others[0] < row / self.curve.pass_ms(1):
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
        """The milliseconds of a pass that holds `rows` rows and their probes."""
        probes = probing.of(rows).total if probing.streams else 0
        width, extra = self.widths[rows], probes * self.curve.probe
        if branches:
            return extra + self.curve.tree_ms(width, self.exact)
        return extra + self.curve.pass_ms(width)

    def observe(self, round_: Round) -> None:
        """Update the rates and the curve."""
        self.curve.learn(round_)
        for name, acceptance in self.acceptance.items():
            if name == round_.method and round_.drafted:
                acceptance.observe(round_)
            else:
                acceptance.fade()
