"""Who may propose in a generation, who decides, and which target verifies."""

import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, MutableMapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np

from jetdraft.contracts.step_contract import Reading
from jetdraft.contracts.tensors import WIDEST, Float32s, Int64s
from jetdraft.devices.providers import SELECTION, check_on_cpu
from jetdraft.errors import DraftingError, OptionError, as_error
from jetdraft.learning.lessons import CANDIDATES, MAX_PLACES, MAX_TOKENS, Lesson
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import NO_PROBING, Probing, Rows, Tokens
from jetdraft.runtime.loaded import Learning, LoadedBundle
from jetdraft.runtime.measured.cost_model import Profit
from jetdraft.runtime.measured.stats import Acceptance, Stats
from jetdraft.runtime.passes.answer import Target
from jetdraft.runtime.planning.controller import (
    AdaptiveController,
    Assignment,
    Controller,
    FixedController,
)
from jetdraft.runtime.planning.drafting import MAX_DRAFT_TOKENS, Drafting
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import WALK, Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Observer, Proposer, Seen, constrain
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.sampling.verifiers import Verifier
from jetdraft.runtime.text.constraint import Matcher


class Learner(Observer):
    """Records the drafter's errors in each generation, and swaps its weights.

    A generation's errors are a `Lesson`, which is written to the folder at its end. New
    weights delete the `acceptance` of the `methods` that draft with the drafter.
    """

    def __init__(
        self,
        learning: Learning,
        cache: DraftCache,
        methods: Collection[str],
        acceptance: MutableMapping[str, Acceptance],
    ) -> None:
        self._lessons, self._weights = learning
        self._cache, self._methods, self._acceptance = cache, methods, acceptance
        self._version = 0
        self._notes: dict[int, tuple[Int64s, Float32s]] = {}
        """The target's candidates by the index of the token that a draft missed."""

    def begin(self, prompt: Tokens, chooser: Chooser) -> None:
        """Swap the drafter's weights, if another set should draft now."""
        self._notes = {}
        version = self._weights.refresh()
        if version == self._version:
            return
        self._version = version
        graph = self._weights.graph()
        if graph is None:
            return
        self._cache.graph.adopt(graph)
        self._cache.forget()
        for name in self._methods:
            self._acceptance.pop(name, None)

    def observe(self, seen: Seen) -> None:
        """Note the target's candidates where all children of a row were wrong."""
        last, place = seen.path[-1], seen.length - 1
        # An inexact guess may be withdrawn: this pass says again what follows its root.
        for index in range(seen.length - len(seen.path), place + 1):
            self._notes.pop(index, None)
        if not seen.rows.children(last):
            return
        answer = seen.answer
        ids, logits = answer.candidates[last], answer.candidate_logits[last]
        self._notes[place] = ids[:CANDIDATES].copy(), logits[:CANDIDATES].copy()
        if len(self._notes) > MAX_PLACES:
            del self._notes[next(iter(self._notes))]

    def end(self, prompt: Tokens, response: Tokens, user: str, stats: Stats) -> None:
        """Write the generation's lesson, and count its accepted tokens."""
        shares = [s for name, s in stats.by_method.items() if name in self._methods]
        accepted = sum(share.accepted_tokens for share in shares)
        evaluated = sum(share.evaluated_tokens for share in shares)
        self._weights.record_acceptance(self._version, accepted, evaluated)
        tokens = [*prompt, *response]
        cut = max(0, len(tokens) - MAX_TOKENS)
        places = [p for p in sorted(self._notes) if cut < p < len(tokens)]
        if places:
            ids, logits = zip(*(self._notes[place] for place in places), strict=True)
            own = np.array(tokens[cut:]), np.array(places) - cut
            lesson = Lesson(*own, np.stack(ids), np.stack(logits))
            self._lessons.add(lesson, user)
        self._notes = {}


class ExpertsCounter(Observer):
    """Counts the experts that the last rows of a text would touch in one pass."""

    def __init__(self, parts: LoadedBundle) -> None:
        self._parts = parts  # its curve is measured when it is first read
        self._rows: deque[Int64s] = deque(maxlen=WIDEST)

    def begin(self, prompt: Tokens, chooser: Chooser) -> None:
        """Forget the last text."""
        self._rows.clear()
        self._parts.curve.touched = {}

    def observe(self, seen: Seen) -> None:
        """Add the rows of the accepted path, and count again."""
        experts = seen.answer.experts
        if experts is None:
            return
        self._rows.extendleft(experts[row].copy() for row in seen.path[-WIDEST:])
        # Each expert counts where it appears first, from the newest row on.
        _, first = np.unique(np.array(self._rows), return_index=True)
        added = np.bincount(first // experts.shape[1], minlength=len(self._rows))
        self._parts.curve.touched = dict(enumerate(added.cumsum().tolist(), start=1))


# Requests can bring ever new options.
MAX_PROPOSERS = 64


@dataclass
class Offer:
    """The draft of a round; `asked` has the rows and the seconds of each proposer.

    `late` has the seconds in which a method read rows of earlier rounds.
    """

    rows: Rows
    method: str = NONE
    probing: Probing = NO_PROBING
    asked: dict[Proposer, tuple[int, float]] = field(default_factory=dict)
    evidence: int = 0
    late: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProposerSet:
    """Who takes part in a generation; the `observers` watch all of its passes."""

    proposers: list[Proposer]
    controller: Controller
    verifier: Verifier
    observers: list[Observer]
    vocab_size: int

    def offer(self, context: Tokens, room: int, reads_late: bool = False) -> Offer:
        """Ask proposers until the controller assigns at most `room` rows, maybe 0.

        A round that `reads_late` drafts nothing; its root's probes draft for the next.
        """
        offer = Offer(Rows.chain([context[-1]]))
        if reads_late and room > 0:
            probing = self.controller.assign(room, {}).probing
            return replace(offer, probing=replace(probing, last_only=True))
        drafts: dict[Proposer, Rows] = {}
        while room > 0:
            # With an offer the controller knows evidence and rows, so it plans again.
            counts = {p: rows.drafted for p, rows in drafts.items()}
            assignment = self.controller.assign(room, counts)
            proposer, budget = assignment.proposer, assignment.budget
            offer.probing = assignment.probing
            if proposer is None:
                break
            if proposer not in drafts:
                start = time.perf_counter()
                proposer.catch_up(context)
                offer.late[proposer.traits.name] = time.perf_counter() - start
                start = time.perf_counter()
                rows = _propose(assignment, context, self.vocab_size)
                offer.asked[proposer] = rows.drafted, time.perf_counter() - start
                drafts[proposer] = rows
                if not rows.drafted and rows.probes is not None:
                    offer.rows = rows  # it says what the root carries
                enough = 1 if assignment.least else budget  # it ended by its own doubt
                if proposer.evidence or rows.drafted < enough:
                    continue
            offer.method, offer.evidence = proposer.traits.name, proposer.evidence
            offer.rows = drafts[proposer].cut(budget)
            break
        return offer


def _failing(name: str) -> AbstractContextManager[None]:
    """Raise `OptionError` for all errors of a method, maybe of another package."""
    fact, fix = f"method {name!r} failed", "leave it out"
    return as_error(OptionError, Exception, fact, fix, "method")


def _propose(assignment: Assignment, context: Tokens, size: int) -> Rows:
    """Ask for rows of tokens below `size`; `OptionError` for failures or wrong rows."""
    proposer, root, problem = assignment.proposer, context[-1], ""
    assert proposer is not None
    with _failing(proposer.traits.name):
        proposer.least = assignment.least
        rows = proposer.propose(context, assignment.budget, assignment.parents)
        given: object = rows.tokens[:1] if isinstance(rows, Rows) else rows
        if given != [root]:
            problem = f"must give Rows whose row 0 is the root, token {root}, not "
            problem += f"{given}; give context[-1] first, also without a guess"
        elif wrong := [t for t in rows.tokens if not 0 <= t < size]:
            outside = f"token {wrong[0]}, which is outside the vocabulary"
            problem = f"proposes {outside}; ids are 0 to {size - 1}"
    if problem:
        raise OptionError(f"method {proposer.traits.name!r} {problem}", "method")
    return rows


class Planner:
    """Makes and keeps a bundle's proposers, and picks some for each generation."""

    def __init__(self, parts: LoadedBundle) -> None:
        self.parts = parts
        self.acceptance: dict[str, Acceptance] = defaultdict(Acceptance)
        self._profits: dict[tuple[str, ...], Profit] = defaultdict(Profit)
        self._proposers: dict[tuple[Method[Any], MethodOptions], Proposer] = {}
        self._learners: list[Observer] = []
        has_experts = parts.target.contract.experts > 0
        self._counters = [ExpertsCounter(parts)] if has_experts else []
        learning, cache = parts.learning, parts.draft_cache
        if learning is not None and cache is not None:
            drafters = {n for n, m in methods().items() if m.cost == "drafter"}
            self._learners.append(Learner(learning, cache, drafters, self.acceptance))

    @property
    def methods(self) -> tuple[str, ...]:
        return (NONE, *self.proposers())

    def proposers(self) -> dict[str, Proposer]:
        """Make a proposer of each method that can be made, with default options."""
        proposers = {}
        for name, method in methods().items():
            with suppress(OptionError):  # the bundle lacks something for this method
                proposers[name] = self.proposer(method, method.options())
        return proposers

    def proposer(self, method: Method[Any], options: MethodOptions) -> Proposer:
        """The proposer of a method with options, made once; raises `OptionError`."""
        key = method, options
        if key not in self._proposers:
            proposer = self._make_proposer(method, options)
            if len(self._proposers) == MAX_PROPOSERS:
                del self._proposers[next(iter(self._proposers))]
            self._proposers[key] = proposer
            traits = proposer.traits
            self.parts.curve.drafts.setdefault(traits.name, traits.ms_per_token)
        self._proposers[key] = self._proposers.pop(key)  # the last to be dropped
        return self._proposers[key]

    def _make_proposer(self, method: Method[Any], options: MethodOptions) -> Proposer:
        with _failing(method.name):
            try:
                if reason := method.lacks(self.parts.bundle):
                    raise OptionError(reason, "method")
                return method.make(self.parts, options)
            except OptionError as error:
                if error.field == "drafting":
                    raise
                problem = f"the bundle has no method {method.name!r}: {error}"
                raise OptionError(problem, "method") from error

    def forget(self) -> None:
        for proposer in self._proposers.values():
            proposer.forget()

    def widths(self, drafting: Drafting) -> list[int]:
        return self.parts.widths.allowed(drafting.exact)

    def target_for(self, drafting: Drafting) -> Target:
        """Prepare and return the target that verifies."""
        widths = self.widths(drafting)  # a first call measures, so it comes before
        # Any other target reads prompts with the bundle's own, so it comes first too.
        reading = Reading.TURNED if drafting.select_kv else Reading.ALL
        self.parts.target.prepare(drafting.exact, reading)
        for name, options in drafting.options.items():
            make = methods()[name].target
            other = None if make is None else make(self.parts, options, widths)
            if other is not None:
                self._check_selection(drafting, name)
                return other
        return self.parts.target

    def proposer_set(
        self, drafting: Drafting, matcher: Matcher | None = None, learns: bool = True
    ) -> ProposerSet:
        """Who proposes, decides and verifies in a generation; raises `OptionError`.

        Drafts keep to a constraint's `matcher`. It `learns` if there is a folder.
        """
        self._check_combination(drafting)
        chosen = self._choose_proposers(drafting)
        verifier = drafting.checker
        for proposer in chosen:
            verifier.check_kind(proposer.traits.kind)
        # Learners first: they may change what the proposers draft with.
        learners = self._learners if learns else []
        observers: list[Observer] = [*learners, *self._counters, *chosen]
        if matcher is not None and verifier.name == WALK:
            chosen = constrain(chosen, matcher)
        controller = self._controller(drafting, chosen)
        size = self.parts.target.contract.vocab_size
        return ProposerSet(chosen, controller, verifier, observers, size)

    def _choose_proposers(self, drafting: Drafting) -> list[Proposer]:
        automatic, chosen = drafting.names == (AUTO,), {}
        for name, options in drafting.options.items():
            method = methods()[name]
            if automatic and not method.in_auto(options):
                continue
            try:
                proposer = self.proposer(method, options)
                self._check_exact_bits(method, options, drafting)
                chosen[method] = proposer
            except OptionError as error:
                # "auto" skips what this machine cannot run, but not wrong options.
                if not automatic or error.field == "drafting":
                    raise
        for one, _ in _conflicts(chosen):  # only "auto" has chosen both
            chosen.pop(one, None)
        return list(chosen.values())

    def _controller(self, drafting: Drafting, chosen: list[Proposer]) -> Controller:
        if not chosen:
            return FixedController(None, 0)
        count, options = drafting.num_draft_tokens, drafting.options.values()
        sized = next((o for o in options if o.draft_size is not None), None)
        if sized is not None:
            size = sized.draft_size or MAX_DRAFT_TOKENS
            widest = self.widths(drafting)[-1]
            if sized.size_is_fixed and size > widest - 1:
                fact = f"the tree has {size} rows, a pass of this bundle holds "
                fact += f"{widest - 1} beside the root; give a smaller tree"
                raise DraftingError(f"{fact} or export with more --max-width")
            return FixedController(chosen[0], count or size)
        if len(drafting.names) == 1 and drafting.names != (AUTO,) and count is not None:
            return FixedController(chosen[0], count)
        given = chosen, self.parts.curve, self.acceptance, self.widths(drafting)
        ends_at_gap = self.parts.widths.ends_at_gap(drafting.exact)
        branches = self.parts.target.contract.tree and self._trees_agree(drafting)
        branching = branches and all(option.may_branch for option in options)
        rules = ends_at_gap, branching, self._profits[drafting.names]
        return AdaptiveController(*given, count or MAX_DRAFT_TOKENS, *rules)

    def _trees_agree(self, drafting: Drafting) -> bool:
        """Whether passes that branch may be used: exact generations need equal bits."""
        return self.parts.widths.trees_agree or not drafting.exact

    def _check_exact_bits(
        self, method: Method[Any], options: MethodOptions, drafting: Drafting
    ) -> None:
        """Raise `OptionError` for a method that changes bits of an exact generation."""
        widths = self.parts.widths
        if method.reads_probes and drafting.exact and not widths.probes_agree:
            fact = "on this machine probes change the last bits of the rows beside them"
            fix = "choose another method or add --no-exact"
            raise OptionError(f"{fact}; {fix}", "method")
        if options.branched and not self._trees_agree(drafting):
            fact = "on this machine passes that branch change the last bits of their "
            fact += "rows; choose tree=chain or add --no-exact"
            raise DraftingError(fact)

    def _check_combination(self, drafting: Drafting) -> None:
        automatic = drafting.names == (AUTO,)
        named = [] if automatic else [methods()[name] for name in drafting.options]
        owners = [method.name for method in named if method.target is not None]
        self._check_selection(drafting, next(iter(owners), ""))
        for one, other in _conflicts(named):
            fact = f"{one.name} drafts in the buffers in which {other.name} keeps its "
            fact += "draft; leave one of the two methods out"
            raise OptionError(fact, "method")

    def _check_selection(self, drafting: Drafting, owner: str = "") -> None:
        """Raise `OptionError` where KV rows should be selected and cannot be.

        `owner` names the method whose own target verifies, if there is such a method.
        """
        if not drafting.select_kv:
            return
        if self.parts.bundle.target.selection is None:
            fact = "the bundle reads all KV rows"
            fix = "export with --select-kv N, or leave select_kv out"
            raise DraftingError(f"{fact}; {fix}")
        if owner:
            fact = f"method {owner} verifies with its own target, which reads all KV "
            fact += "rows; choose another method, or leave select_kv out"
            raise DraftingError(fact)
        fix = "choose --provider cpu, or leave select_kv out"
        check_on_cpu(SELECTION, self.parts.provider, fix, "drafting")


def _conflicts(chosen: Iterable[Method[Any]]) -> list[tuple[Method[Any], Method[Any]]]:
    """Pairs (a, b) where a fills the target's buffers and b has its own target."""
    pairs = permutations(chosen, 2)
    return [(a, b) for a, b in pairs if a.fills_target and b.target is not None]
