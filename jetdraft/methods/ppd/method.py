"""Drafting with prompt tokens in sparse trees (2405.18628)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import WIDEST
from jetdraft.methods.ppd.sparse_trees import SparsePlan, best_plan
from jetdraft.options import between
from jetdraft.runtime.drafts.rows import Kind, Rows, Tokens
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.measured.cost_model import PassMs, RoundCosts
from jetdraft.runtime.measured.stats import GuessRates, RankRates, Round
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.drafter_methods import lacks_probes, probe_proposer
from jetdraft.runtime.proposers.method import AUTO, Method, TreeOptions
from jetdraft.runtime.proposers.model_proposer import ProbeProposer
from jetdraft.runtime.proposers.proposer import Parents, Proposer, Seen, Traits
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.trees.shapes import RANK_RATES, Static, draw_siblings

NAME = "ppd"


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
            self.rates.add_guesses(self._sibling_tokens(*self._last_guesses))

    def _sibling_tokens(self, first: int, guesses: Answer) -> dict[int, list[int]]:
        """Return the guesses by place, from `first` on, in the order of siblings."""
        kind, sampling = self.traits.kind, self.chooser.sampling
        tokens = {}
        for depth, rates in enumerate(self.rates.ranks[: len(guesses.candidates)]):
            level = guesses.rows(slice(depth, depth + 1))
            q, place = self.chooser.draft_distribution(level), first + depth
            tokens[place] = draw_siblings(kind, q, len(rates), sampling, place)
        return tokens

    def propose(self, context: Tokens, budget: int, parents: Parents = None) -> Rows:
        guesses = self.guesses(context)
        # Near the end there is less room, for which no new plan is made.
        self._budget = max(self._budget, budget)
        if self._count_rest():
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

    def _count_rest(self) -> bool:
        if not self._resting:
            return False
        self._resting -= 1
        if not self._resting:
            self._next_look = self.rates.settled + FIRST_REPLAN
            self._all_until = max(self._all_until, self._next_look)
        return True


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
