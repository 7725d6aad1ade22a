"""Decides which proposer drafts in a round and how many rows, perhaps no rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices.best_tree import best_tree
from jetdraft.runtime.drafts.rows import NO_PROBING, Probing
from jetdraft.runtime.measured.cost_model import Curve, Profit
from jetdraft.runtime.measured.stats import Acceptance, Round
from jetdraft.runtime.proposers.proposer import Proposer


@dataclass(frozen=True)
class Assignment:
    """Ask `proposer` for `budget` rows, as a tree by `parents`; None is no draft."""

    proposer: Proposer | None
    budget: int
    probing: Probing = NO_PROBING
    parents: tuple[int, ...] | None = None
    least: float = 0.0  # A chain may end before, see `Proposer.least`.


NO_DRAFT = Assignment(None, 0)
# How many times the value of a simpler plan, which has more evidence, a plan needs.
MARGIN = 1.02
LEARNING_ROUNDS = 8  # The controller learns from each eighth round without a plan.
NEGLIGIBLE = 0.01  # Less likely tokens are not planned.
MAX_SURE = 8  # The most tokens of a chain that ends by its own doubt.
NEARLY = 1.04  # How many times the fastest chain's ms a token a shorter may take.
TOKEN_PASSES = 0.5  # About how many plain passes a right drafted token saves.
MAX_LEAST = 0.85  # The largest `least`, so that sure text is always drafted on.
MAX_SIBLINGS = 3  # Children of a planned row beside its first child.


class FixedController:
    """A controller that always assigns the same proposer and draft length."""

    def __init__(self, proposer: Proposer | None, num_draft_tokens: int) -> None:
        self.proposer, self.num_draft_tokens = proposer, num_draft_tokens

    def assign(self, room: int, offers: Mapping[Proposer, int]) -> Assignment:
        """Assign a draft of the fixed length, or the part of it that fits `room`."""
        if self.proposer is None:
            return NO_DRAFT
        probing = Probing(min(self.num_draft_tokens, self.proposer.traits.probes))
        budget = min(self.num_draft_tokens, _most_tokens(self.proposer, room, offers))
        drafting = self.proposer if budget > 0 else None
        return Assignment(drafting, max(budget, 0), probing)

    def observe(self, round_: Round) -> None:
        """Do nothing: a fixed plan learns nothing."""


def _most_tokens(proposer: Proposer, room: int, offers: Mapping[Proposer, int]) -> int:
    return min(room, offers.get(proposer, proposer.traits.max_draft_tokens))


class _Promise(NamedTuple):
    """A possible draft of `length` rows and `depth` levels, and what it promises.

    tokens   the expected tokens that a round with it commits
    chance   the chance that the whole draft is right
    parents  the shape of a tree; None for a chain
    """

    length: int
    depth: int
    tokens: float
    chance: float
    parents: tuple[int, ...] | None = None


class _SteadyPlan(NamedTuple):
    """A plan for many rounds, each with the same probes.

    value     the expected tokens per millisecond
    prepared  how many tokens more a round is worth if probes have drafted for it
    """

    probing: Probing
    value: float
    prepared: float


class AdaptiveController:
    """Picks the proposer and length that promise most committed tokens per second.

        a_i      the rate of draft position i, K the length, t(w) the time of a pass
        tokens = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_K     (Leviathan et al., section 3)
        spent  = t(K + 1) + K times the time of a drafted token
        choose the draft with the largest tokens / spent; no draft is K = 0

    With `branching`, proposers that branch are asked for trees where trees promise
    more: the rows that are most likely right, as many as a pass holds. Probes cost time
    one pass before their draft is used, so the controller compares plans for many
    rounds: without probes, or with the probes that pay in the long run. Where drafts
    have gained nothing by the clock, most rounds have no draft, see `Profit`.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        curve: Curve,
        acceptance: dict[str, Acceptance],
        widths: Sequence[int],
        max_draft_tokens: int,
        ends_at_gap: bool = True,
        branching: bool = False,
        profit: Profit | None = None,
    ) -> None:
        self.proposers = list(proposers)
        self.curve, self.ends_at_gap, self.branching = curve, ends_at_gap, branching
        # widths[n] is the narrowest allowed width that holds n rows.
        allowed = sorted(widths)
        self.widths = [
            next((w for w in allowed if w >= rows), rows) for rows in range(1 + WIDEST)
        ]
        self.max_draft_tokens, self.acceptance = max_draft_tokens, acceptance
        self.profit = profit or Profit()
        self.profit.begin(curve.pass_ms(1))
        self._rest_rounds, self._is_planning = 0, True
        self._askable: list[Proposer] = []  # in this round

    def assign(self, room: int, offers: Mapping[Proposer, int]) -> Assignment:
        """Assign the draft that promises most; no draft in rounds without a plan."""
        if not self._rest_rounds:
            may_ask, every = self.profit.may_ask, self.proposers
            self._askable = [p for p in every if p in offers or may_ask(p.traits.name)]
            self._rest_rounds = 0 if self._askable else self.profit.MAX_REST
        self._is_planning = not self._rest_rounds
        if not self._is_planning:
            self._rest_rounds -= 1
            return NO_DRAFT
        plan: tuple[Proposer, _Promise] | None = None
        best_value, winner = 1.0 / self._pass_ms(1, NO_PROBING), None
        for proposer, promise, spent_ms in self._all_drafts(room, offers, NO_PROBING):
            value = promise.tokens / spent_ms
            if value > MARGIN * best_value:
                plan, best_value = (proposer, promise), value
        for proposer in self.proposers:
            for steady in self._steady_plans(proposer):
                if steady.value > MARGIN * best_value:
                    winner, best_value = steady, steady.value
        if winner is not None:
            return self._best_with_probes(room, offers, winner)
        if plan is None:
            return NO_DRAFT
        proposer, promise = plan
        if proposer.traits.stops and proposer not in offers:
            return self._until_doubt(proposer, room)
        return Assignment(proposer, promise.length, parents=promise.parents)

    def _until_doubt(self, proposer: Proposer, room: int) -> Assignment:
        """Assign a chain that ends once another token likely costs more than it saves.

        least = ms of a token and its row / (TOKEN_PASSES * ms of a plain pass)

        Its limit is the smallest at which right tokens come nearly as fast as at any.
        """
        most = min(MAX_SURE, self.max_draft_tokens, _most_tokens(proposer, room, {}))
        each_ms = self.curve.drafts.get(proposer.traits.name, 0.0) + self.curve.kept_row
        ms = [self._pass_ms(1 + n, NO_PROBING) + n * each_ms for n in range(most + 1)]
        paces = {n: ms[n] / (n + 1) for n in range(1, most + 1)}
        limit = next(n for n in paces if paces[n] <= NEARLY * min(paces.values()))
        least = (ms[limit] - ms[0]) / limit / (TOKEN_PASSES * ms[0])
        return Assignment(proposer, limit, least=min(least, MAX_LEAST))

    def _best_with_probes(
        self, room: int, offers: Mapping[Proposer, int], steady: _SteadyPlan
    ) -> Assignment:
        """The draft that is worth most if the next rounds have the same probes.

            worth = tokens - value * spent + chance * prepared

        `value * spent` are the tokens that the same time brings in the long run. By
        `chance` this round's probes draft for the next, which is then worth `prepared`
        tokens more.
        """
        probing, best = steady.probing, Assignment(None, 0, steady.probing)
        spent_ms = self._pass_ms(1, probing)
        best_worth = 1.0 - steady.value * spent_ms + steady.prepared
        for proposer, promise, spent_ms in self._all_drafts(room, offers, probing):
            if probing.last_only and promise.parents is not None:
                continue  # the accepted path seldom ends at the last row of a tree
            chance = promise.chance if probing.last_only else 1.0
            worth = promise.tokens - steady.value * spent_ms + chance * steady.prepared
            if worth > best_worth:
                given = proposer, promise.length, probing, promise.parents
                best, best_worth = Assignment(*given), worth
        return best

    def _all_drafts(
        self, room: int, offers: Mapping[Proposer, int], probing: Probing
    ) -> Iterator[tuple[Proposer, _Promise, float]]:
        """Each draft that this round may ask for: proposer, promise, milliseconds."""
        for proposer in self._askable:
            traits = proposer.traits
            if traits.probes and not probing.streams:
                continue  # it drafts with probes, and this round has none
            limit = min(self.max_draft_tokens, _most_tokens(proposer, room, offers))
            token_ms, evidence = self.curve.drafts.get(traits.name, 0.0), None
            if proposer in offers:  # its rows are there, and their time is spent
                token_ms, evidence = 0.0, proposer.evidence
            for promise in self._promises(proposer, limit, evidence):
                length = promise.length
                branches = promise.parents is not None
                ms = self._pass_ms(length + 1, probing, branches) + length * token_ms
                # Recurrent states take up the rows in the next pass.
                ms += (promise.tokens - 1.0) * self.curve.kept_row
                yield proposer, promise, ms

    def _steady_plans(self, proposer: Proposer) -> Iterator[_SteadyPlan]:
        """The plans for many rounds with a proposer's probes.

        If every row carries probes, each round has a draft. If only the last row
        carries them, a wrong token leaves the next round without a draft:

            p  the chance that a whole draft is right
            T  the tokens of a round with a draft, t its milliseconds
            u  the milliseconds of a round without a draft, which commits 1 token
            value    = (T + 1 - p) / (t + (1 - p) u)
            prepared = (T - 1 - value (t - u)) / (2 - p)
        """
        if not proposer.traits.probes:
            return
        limit = min(self.max_draft_tokens, proposer.traits.max_draft_tokens)
        for length, depth, tokens, chance, parents in self._promises(proposer, limit):
            every_row, last_row = Probing(depth), Probing(depth, last_only=True)
            pass_ms = self._pass_ms(length + 1, every_row, parents is not None)
            yield _SteadyPlan(every_row, tokens / pass_ms, 0.0)
            if parents is not None:
                continue
            draft_ms = self._pass_ms(length + 1, last_row)
            plain_ms = self._pass_ms(1, last_row)
            value = (tokens + 1 - chance) / (draft_ms + (1 - chance) * plain_ms)
            prepared = (tokens - 1 - value * (draft_ms - plain_ms)) / (2 - chance)
            yield _SteadyPlan(last_row, value, prepared)

    def _promises(
        self, proposer: Proposer, limit: int, evidence: int | None = None
    ) -> Iterator[_Promise]:
        tokens = chance = 1.0
        traits = proposer.traits
        deepest = min(limit, traits.probes or limit)
        rates = self.acceptance[traits.name].rates(deepest, evidence)
        for length, rate in enumerate(rates, start=1):
            chance *= rate
            if chance < NEGLIGIBLE:
                break
            tokens += chance
            fills = length == deepest or self.widths[length + 1] == length + 1
            if chance == 1.0 and not fills:
                continue  # the same pass holds another sure row
            yield _Promise(length, length, tokens, chance)
        if self.branching and traits.branches and rates:
            yield from self._tree_promises(proposer, limit, rates)

    def _tree_promises(
        self, proposer: Proposer, limit: int, rates: list[float]
    ) -> Iterator[_Promise]:
        """The promises of the likeliest trees that fill a pass.

        Where a commit ends at a gap, a row off the first path runs again: it is worth
        a token less the cost of a row.
        """
        plain_ms, widest_ms = self.curve.pass_ms(1), self.curve.pass_ms(WIDEST)
        row_tokens = (widest_ms - plain_ms) / (WIDEST - 1) / plain_ms
        worth = 1.0 - row_tokens if self.ends_at_gap else 1.0
        others = self.acceptance[proposer.traits.name].sibling_shares(MAX_SIBLINGS)
        if worth * (1.0 - min(rates)) * others[0] < row_tokens:
            return  # not even the best branch pays for its row
        ranks = [[r, *((1.0 - r) * share for share in others)] for r in rates]
        parents, chances = best_tree(limit, ranks)
        tokens, depths, on_first_path = 1.0, [0], [True]
        for index, (parent, chance) in enumerate(zip(parents, chances, strict=True)):
            depths.append(depths[parent] + 1)
            on_path = on_first_path[parent] and parent not in parents[:index]
            on_first_path.append(on_path)
            tokens += chance * (1.0 if on_path else worth)
            length = index + 1
            if length + 1 in self.widths and not all(on_first_path):
                shape = tuple(parents[:length])
                yield _Promise(length, max(depths), tokens, 0.0, shape)

    def _pass_ms(self, rows: int, probing: Probing, branches: bool = False) -> float:
        probes = probing.of(rows).total if probing.streams else 0
        width, probes_ms = self.widths[rows], probes * self.curve.probe
        if branches:
            return probes_ms + self.curve.tree_ms(width, self.ends_at_gap)
        return probes_ms + self.curve.pass_ms(width)

    def observe(self, round_: Round) -> None:
        """Learn from a round: the rates, the curve and the profit."""
        if self._is_planning:
            self._rest_rounds = self.profit.add_planned(round_)
        else:
            self.profit.add_plain(round_)
            if self._rest_rounds % LEARNING_ROUNDS:
                return  # learning takes a hundredth of a short pass
        self.curve.learn(round_)
        for name, acceptance in self.acceptance.items():
            if name == round_.method and round_.drafted:
                acceptance.observe(round_)
            else:
                acceptance.fade()


Controller = FixedController | AdaptiveController
