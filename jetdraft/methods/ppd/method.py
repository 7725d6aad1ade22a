"""Drafting with prompt tokens in sparse trees (2405.18628, section 4).

Rows of a sparse tree carry numbers of probes of their own. A row that carries d probes
and is accepted last leaves d guesses to the next draft. So d is the state of a Markov
chain over the rounds, and each state has a tree of its own:

    f_d       the expected tokens of a round in state d: the sum of its rows' chances
    p_c       the chance that row c is accepted last: its chance less its children's
    removal   the probe whose loss p_c (f_d - f_{d-1}) is least goes, until all fit
    tau       the mean of f_d over the steady state of the chain
    rate      g, the tokens of a millisecond in the steady state
    worth     h_d = f_d - g * pass time + the mean of h over the states that follow
    choose    for each state the tree and the probes with the largest right side, again
              with their own g and h, until g grows no more (Howard, 1960)
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul
from typing import Annotated

import numpy as np

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices.best_tree import best_tree
from jetdraft.options import between
from jetdraft.runtime.drafts.rows import Kind, Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.cost_model import PassMs, RoundCosts
from jetdraft.runtime.measured.stats import GuessRates, RankRates, Round
from jetdraft.runtime.proposers.drafter_methods import lacks_probes, probe_proposer
from jetdraft.runtime.proposers.method import AUTO, Method, TreeOptions
from jetdraft.runtime.proposers.model_proposer import ProbeProposer
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Seen, Traits
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.trees.shapes import RANK_RATES, Static, draw_siblings

NAME = "ppd"
_LEAK = 1e-3  # The chance that a round begins without guesses.
_MAX_IMPROVEMENTS = 20  # Most improvements of a plan; a few suffice.


@dataclass(frozen=True)
class PromptOptions(TreeOptions):
    """A draft of prompt tokens: rows of a sparse tree, and slots with prompt tokens.

    The tree "auto" is the paper's sparse tree; None lets the pass times decide.
    """

    rows: Annotated[int | None, between(1, WIDEST - 1)] = None
    slots: Annotated[int | None, between(2, 1024)] = None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        for key in ("rows", "slots"):
            if getattr(self, key) is not None and self.tree != AUTO:
                yield f"{key} is for sparse trees only; leave tree={self.tree} out"

    @property
    def draft_size(self) -> int | None:
        """The most rows of a sparse tree, which is planned once and not each round."""
        return self.rows or WIDEST - 1 if self.tree == AUTO else super().draft_size


@dataclass(frozen=True)
class SparseTree:
    """The rows of a draft, depth first, and how many probes each of them carries.

    `parents` are of rows 1, 2, ...; `counts`, and acceptance `chances`, of all rows.
    """

    parents: tuple[int, ...]
    chances: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def tokens(self) -> float:
        """The expected tokens of a round, the new token included."""
        return sum(self.chances)

    @property
    def size(self) -> tuple[int, int]:
        """Its rows, the root included, and its probes."""
        return len(self.counts), sum(self.counts)

    @cached_property
    def last_chances(self) -> list[float]:
        """The chance of each row to be accepted last."""
        ends = list(self.chances)
        for parent, chance in zip(self.parents, self.chances[1:], strict=True):
            ends[parent] -= chance
        return ends

    def with_probes(self, worth: Sequence[float], probes: int) -> "SparseTree":
        """Return the rows with the `probes` most useful, by the `worth` of states."""
        counts = [len(worth) - 1] * len(self.chances)
        losses = [(self._probe_loss(worth, r, counts), r) for r in range(len(counts))]
        heapq.heapify(losses)
        for _ in range(sum(counts) - probes):
            _, r = heapq.heappop(losses)
            counts[r] -= 1
            if counts[r]:
                heapq.heappush(losses, (self._probe_loss(worth, r, counts), r))
        return replace(self, counts=tuple(counts))

    def _probe_loss(self, worth: Sequence[float], row: int, counts: list[int]) -> float:
        """Return the expected tokens that are lost with one probe of a row."""
        return self.last_chances[row] * (worth[counts[row]] - worth[counts[row] - 1])


@dataclass(frozen=True)
class SparsePlan:
    """A tree for each number of probes that the last accepted row carried."""

    trees: tuple[SparseTree, ...]

    @cached_property
    def transitions(self) -> np.ndarray:
        """The chance of each state to follow each state, float [states, states]."""
        chain = np.zeros((len(self.trees), len(self.trees)))
        for state, tree in enumerate(self.trees):
            for end, count in zip(tree.last_chances, tree.counts, strict=True):
                chain[state, count] += (1 - _LEAK) * end
        chain[:, 0] += _LEAK
        return chain

    @cached_property
    def steady_state(self) -> list[float]:
        """The share of rounds in each state: the steady state of the chain."""
        system = (self.transitions - np.eye(len(self.transitions))).T
        system[-1] = 1.0
        return np.linalg.solve(system, np.eye(len(system))[-1]).tolist()  # type: ignore[no-any-return]

    def state_values(self, pass_ms: PassMs) -> tuple[float, list[float]]:
        """Return the tokens per ms, and each state's gain in tokens over state 0."""
        system = np.eye(len(self.transitions)) - self.transitions
        system[:, 0] = [pass_ms(*tree.size) for tree in self.trees]
        rate, *others = np.linalg.solve(system, [tree.tokens for tree in self.trees])
        return float(rate), [0.0, *map(float, others)]

    @property
    def tokens(self) -> float:
        """tau: the expected tokens of a round."""
        return self._mean([tree.tokens for tree in self.trees])

    def tokens_per_ms(self, pass_ms: PassMs) -> float:
        """Return the expected tokens per ms of pass time."""
        return self.tokens / self._mean([pass_ms(*t.size) for t in self.trees])

    def _mean(self, numbers: Sequence[float]) -> float:
        return float(sum(map(mul, self.steady_state, numbers)))


def likeliest_tree(ranks: RankRates, rows: int) -> SparseTree:
    """Return the tree of the `rows` likeliest rows; `ranks` has chances by level."""
    parents, chances = best_tree(rows, ranks)
    tree = Rows(list(range(1 + len(parents))), [-1, *parents]).depth_first()
    ordered = tuple([1.0, *chances][number] for number in tree.tokens)
    return SparseTree(tuple(tree.parents[1:]), ordered, (0,) * len(ordered))


def make_plan(ranks: RankRates, rows: Sequence[int], slots: int) -> SparsePlan:
    """Make the plan with `rows[d - 1]` drafted rows in state d; probes fill `slots`."""
    states = range(len(ranks) + 1)
    bare = [likeliest_tree(ranks[:d], rows[d - 1] if d else 0) for d in states]
    worth = [tree.tokens for tree in bare]
    left = ((tree, max(0, slots - tree.size[0])) for tree in bare)
    return SparsePlan(tuple(tree.with_probes(worth, n) for tree, n in left))


def best_plan(
    ranks: RankRates, most: int, pass_ms: PassMs, rows: int = 0, slots: int = 0
) -> SparsePlan:
    """Return the plan of at most `most` drafted rows with the most tokens per ms.

    `rows` is for all states, `slots` for all passes; 0 lets states and rows differ.
    """
    counts = [min(rows, most)] if rows else range(1, most + 1)
    gamma = len(ranks)
    if slots:
        plans = [make_plan(ranks, (count,) * gamma, slots) for count in counts]
        return max(plans, key=lambda plan: plan.tokens_per_ms(pass_ms))
    trees = [[likeliest_tree((), 0)]]
    known = [ranks[:depth] for depth in range(1, gamma + 1)]
    trees += [[likeliest_tree(best, n) for n in counts] for best in known]
    bare = [of_state[0] for of_state in trees]
    plan = SparsePlan(tuple(replace(t, counts=(1,) * t.size[0]) for t in bare))
    for _ in range(_MAX_IMPROVEMENTS):
        better = _improve_plan(plan, trees, pass_ms)
        if better == plan:
            break
        plan = better
    return plan


def _improve_plan(
    plan: SparsePlan, trees: Sequence[Sequence[SparseTree]], pass_ms: PassMs
) -> SparsePlan:
    """Return the plan with the best tree for each state, by the values of `plan`."""
    rate, worth = plan.state_values(pass_ms)

    def carrying(tree: SparseTree, least: int) -> SparseTree:
        """Give each row the number of probes that gains most; all cost alike."""
        rows, _ = tree.size
        price = rate * (pass_ms(rows, 1) - pass_ms(rows, 0))
        ends = tree.last_chances
        gains = [[e * h - n * price for n, h in enumerate(worth)] for e in ends]
        numbers = range(least, len(worth))
        best = tuple(max(numbers, key=of_row.__getitem__) for of_row in gains)
        return replace(tree, counts=best)

    def gain(tree: SparseTree) -> float:
        pairs = zip(tree.last_chances, tree.counts, strict=True)
        later = sum(e * worth[n] for e, n in pairs)
        return tree.tokens - rate * pass_ms(*tree.size) + later

    least = (int(not state) for state in range(len(trees)))
    pairs = ([carrying(t, n) for t in own] for own, n in zip(trees, least, strict=True))
    return SparsePlan(tuple(max(of_state, key=gain) for of_state in pairs))


# After how many compared guesses a plan is made again: the first time, and at most.
FIRST_REPLAN, MAX_REPLAN_GAP = 24, 512
# The first guesses are compared in every round. Later only some places are, since the
# order of sampled siblings costs as much as a draft; after a rest all, until a look.
ALL_COMPARED, COMPARED_EVERY = 96, 8
# Rounds without drafts and probes where no plan pays: the first time, and at most.
RESTS = (64, 512)


class PromptProposer(ProbeProposer):
    """Drafts a sparse tree, chosen by the number of guesses from the last round."""

    def __init__(
        self,
        contract: StepContract,
        ranks: RankRates,
        pass_ms: PassMs,
        options: PromptOptions | None = None,
    ) -> None:
        widest = contract.max_width - 1
        super().__init__(Traits(NAME, widest, Kind.COUPLED, probes=contract.streams))
        self.rates, self.costs = GuessRates(ranks), RoundCosts(pass_ms)
        self._options = options or PromptOptions()
        self.forget()

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        super().begin(prompt, chooser)
        self.rates.begin()
        self._budget = 0

    def forget(self) -> None:
        self.rates.forget()
        self.costs.forget()
        self._plans: dict[int, SparsePlan] = {}
        self._budget = 0
        self._next_look, self._all_until = FIRST_REPLAN, ALL_COMPARED
        self._resting, self._next_rest = 0, RESTS[0]

    def learn_times(self, round_: Round) -> None:
        self.costs.learn(round_)

    def observe(self, seen: Seen) -> None:
        super().observe(seen)
        tokens = [seen.rows.tokens[row] for row in seen.path]
        self.rates.compare(seen.length - 1 - len(tokens), tokens)
        all_count = self.rates.settled < self._all_until
        is_lesson = all_count or not seen.length % COMPARED_EVERY
        if self._last_guesses is not None and is_lesson:
            first, guesses = self._last_guesses
            kind, sampling = self.traits.kind, self.chooser.sampling
            by_place = {}  # in the order of siblings
            for depth, rates in enumerate(self.rates.ranks[: len(guesses.candidates)]):
                level = guesses.rows(slice(depth, depth + 1))
                q, place = self.chooser.draft_distribution(level), first + depth
                by_place[place] = draw_siblings(kind, q, len(rates), sampling, place)
            self.rates.add_guesses(by_place)

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        guesses = self.guesses(context)
        # Near the end there is less room, for which no new plan is made.
        self._budget = max(self._budget, budget)
        if self._resting:
            self._resting -= 1
            if not self._resting:
                self._next_look = self.rates.settled + FIRST_REPLAN
                self._all_until = max(self._all_until, self._next_look)
            return replace(Rows.chain([context[-1]], self.traits.kind), probes=(0,))
        trees = self.plan(self._budget).trees
        if guesses is None:
            counts = trees[0].counts
            return replace(Rows.chain([context[-1]], self.traits.kind), probes=counts)
        planned = trees[len(guesses.candidates)]
        rows = self.grow(Static(planned.parents), guesses, context, budget)
        return replace(rows, probes=planned.counts[: len(rows)])

    def plan(self, most: int) -> SparsePlan:
        """Return the plan of trees of at most `most` rows; it may begin a rest."""
        if self.rates.settled >= self._next_look:
            self._next_look += min(self.rates.settled, MAX_REPLAN_GAP)
            self._plans.clear()
        if most not in self._plans:
            ranks, options = self.rates.ranks, self._options
            rows, slots = options.rows or 0, options.slots or 0
            round_ms = self.costs.round_ms
            plan = best_plan(ranks, most, round_ms, rows, slots)
            self._plans[most] = plan
            is_free = not (rows or slots)
            if is_free and plan.tokens_per_ms(round_ms) * round_ms(1, 0) < 1.0:
                self._resting = self._next_rest
                self._next_rest = min(2 * self._next_rest, RESTS[1])
        return self._plans[most]


def _make_proposer(loaded: LoadedBundle, options: PromptOptions) -> Proposer:
    contract = loaded.target.contract
    if options.tree != AUTO:
        return probe_proposer(NAME, loaded, options)
    streams = loaded.bundle.target.streams or {}
    ranks: RankRates = streams.get("ranks") or [RANK_RATES] * contract.streams
    if not (contract.tree and loaded.widths.trees_agree):  # trees would change bits
        ranks = [rates[:1] for rates in ranks]

    def pass_ms(rows: int, probes: int) -> float:
        # More widths are proven, and timed, while nobody generates.
        curve, widths = loaded.curve, loaded.widths.exact
        width = widths[min(bisect_left(widths, rows), len(widths) - 1)]
        wider = max(0, rows - width) * curve.probe
        return curve.probed_ms(width, probes, contract.streams) + wider

    return PromptProposer(contract, ranks, pass_ms, options)


METHOD = Method(
    NAME,
    "prompt tokens that the target reads, in sparse trees",
    _make_proposer,
    PromptOptions,
    lacks=lacks_probes(NAME, mode="prompts"),
    # It always drafts; "auto" drafts with the same probes where they pay, as `stream`.
    in_auto=lambda options: False,
    trees=True,
    reads_probes=True,
    samples=({"tree": "chain"}, {"tree": "best"}, {"rows": 7, "slots": 24}),
    task="jetdraft.methods.ppd.task:PpdTask",
)
