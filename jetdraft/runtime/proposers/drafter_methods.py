"""Methods that draft with a bundle's drafter: a record each, made of a few facts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from jetdraft.bundle import Bundle
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import DraftingError, OptionError, check_choice
from jetdraft.manifest import GraphEntry
from jetdraft.options import Range, between
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.method import Method, OptionsT, TreeOptions
from jetdraft.runtime.proposers.model_proposer import (
    THRESHOLDS,
    DraftStop,
    Grow,
    GrowShape,
    Guesses,
    ModelProposer,
    ProbeProposer,
    confidence,
    grow_guesses,
    grow_levels,
    make_draft_stop,
)
from jetdraft.runtime.proposers.proposer import Proposer, Traits

SAMPLES = ({"tree": "best"}, {"tree": "heap"}, {"tree": "comb"})
PROBABILITY = Range(lambda p: 0.0 <= p <= 1.0, "0 (off) to 1")  # 0 switches it off.
Make = Callable[[str, LoadedBundle, DraftCache, OptionsT], Proposer]
Fits = Callable[[StepContract, GraphEntry], object]


@dataclass(frozen=True)
class DraftOptions(TreeOptions):
    """The shape of a drafter's drafts, and the rule that ends its chains early.

    stopping        "confidence", "product" or "learned", see `THRESHOLDS`
    stop_threshold  the probability that the rule compares with
    """

    stopping: str | None = None
    stop_threshold: Annotated[float | None, between(0, 1)] = None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.stopping is not None:
            check_choice(DraftingError, "stopping", self.stopping, THRESHOLDS)
            if self.branched:
                yield f"stopping {self.stopping!r} ends chains, not trees; leave it out"
        elif self.stop_threshold is not None:
            yield "stop_threshold needs a stopping rule; give stopping too"


@dataclass(frozen=True)
class BlockOptions(TreeOptions):
    """How a block is filled, and how much of it is verified.

    steps       2: the second half of a chain is guessed again when the first is known
    confidence  a chain ends after the token at which the product of the drafter's
                highest probabilities falls below this
    """

    steps: Annotated[int, Range(lambda n: n in (1, 2), "1 or 2")] = 1
    confidence: Annotated[float, PROBABILITY] = THRESHOLDS["product"]

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.steps > 1 and self.branched:
            fact = "a second pass needs the tokens of the first half, and a tree has "
            fact += "several; leave the tree out"
            yield fact

    @property
    def may_branch(self) -> bool:
        return self.steps == 1 and super().may_branch


def token_proposer(
    name: str,
    loaded: LoadedBundle,
    cache: DraftCache,
    options: DraftOptions,
    grow: GrowShape = grow_levels,
) -> Proposer:
    """Make a proposer that drafts token by token, or by levels or blocks of a tree."""
    stop = make_draft_stop(options.stopping, options.stop_threshold, loaded)
    block = cache.graph.contract.ahead  # its passes branch, also for a chain
    check_trees(*([cache.graph] if block else ()))
    ms = loaded.curve.drafter / max(block, 1)
    return chain_or_tree_proposer(name, loaded, cache, options, ms, stop, grow)


def chain_or_tree_proposer(
    name: str,
    loaded: LoadedBundle,
    cache: DraftCache,
    options: TreeOptions,
    ms_per_token: float,
    stop: DraftStop | None,
    grow: GrowShape = grow_levels,
) -> Proposer:
    """Make a proposer of chains that `stop` ends, or of trees that `grow` drafts."""
    contract, kind = cache.graph.contract, options.kind
    stops = stop is None and not (options.branched or contract.ahead)  # not of blocks
    traits = Traits(name, contract.max_width - 1, kind, ms_per_token, stops=stops)
    if not options.branched:
        end, lookup = loaded.picture_token, None
        if cache.skips:
            lookup = LookupProposer(source=lambda: loaded.source, end=end)
        return ModelProposer(cache, traits, stop=stop, lookup=lookup)
    check_trees(loaded.target, cache.graph)
    return ModelProposer(cache, traits, partial(grow, options.shape))


def guess_proposer(
    name: str,
    loaded: LoadedBundle,
    cache: DraftCache,
    options: TreeOptions,
    chain: Grow | None = None,
) -> Proposer:
    """Make a proposer of what one answer guesses: a `chain`, or a tree."""
    contract, count = loaded.target.contract, cache.graph.contract.guesses
    grow = chain or Guesses()
    if options.branched:
        check_trees(loaded.target)
        grow = partial(grow_guesses, options.shape)
    branches = options.may_branch and contract.tree and not options.branched
    most = contract.max_width - 1 if options.branched or branches else count
    ms = loaded.curve.drafter / count
    traits = Traits(name, most, options.kind, ms, branches=branches)
    return ModelProposer(cache, traits, grow)


def block_proposer(
    name: str, loaded: LoadedBundle, cache: DraftCache, options: BlockOptions
) -> Proposer:
    """Make a proposer of a block: its beginning up to a doubt, or a tree of guesses."""
    chain = Guesses(DraftStop(confidence, options.confidence), options.steps)
    return guess_proposer(name, loaded, cache, options, chain)


def drafter_method(
    name: str,
    summary: str,
    needs: str,
    fits: Fits,
    *,
    make: Make[OptionsT],
    options: type[OptionsT],
    flag: str = "--head",
    in_auto: bool = True,
    **more: Any,
) -> Method[OptionsT]:
    """Make the record of a method whose drafter an export adds with `flag`."""

    def lacks(bundle: Bundle) -> str:
        entry = bundle.drafter
        if entry is not None and fits(entry.contract, bundle.target):
            return ""
        return f"export with {flag}" + (f", and {needs}" if flag == "--head" else "")

    def make_checked(loaded: LoadedBundle, options: OptionsT) -> Proposer:
        """Make the proposer; raises `OptionError` if the drafter is off or missing."""
        if loaded.draft_cache is None or lacks(loaded.bundle):
            fact = f"{name} needs {needs}"
            fix = f"export with {flag}, and do not pass --drafter-provider off"
            raise OptionError(f"{fact}; {fix}", "method")
        return make(name, loaded, loaded.draft_cache, options)

    own: dict[str, Any] = {"trees": True, "samples": SAMPLES, "lacks": lacks}
    own["in_auto"] = lambda options: in_auto
    return Method(name, summary, make_checked, options, **(own | more))


token_drafter = partial(
    drafter_method, make=token_proposer, options=DraftOptions, cost="drafter", alone={}
)
block_drafter = partial(
    drafter_method,
    make=block_proposer,
    options=BlockOptions,
    samples=(*SAMPLES, {"steps": 2}),
    alone={"confidence": 0.0},
)


def probe_proposer(
    name: str,
    loaded: LoadedBundle,
    options: TreeOptions,
    probes: int = 0,
    branches: bool = False,
) -> Proposer:
    """Make a proposer of what `probes` of the target guessed; 0 for all its probes."""
    contract = loaded.target.contract
    shape = options.shape if options.branched else None
    branches = branches and contract.tree and shape is None
    most = contract.max_width - 1 if shape or branches else contract.streams
    probes = probes or contract.streams
    traits = Traits(name, most, options.kind, probes=probes, branches=branches)
    return ProbeProposer(traits, shape)


def lacks_probes(verb: str, mode: str = "") -> Callable[[Bundle], str]:
    """Make a `Method.lacks` that asks for a target with probes, of a `mode` or any."""

    def lacks(bundle: Bundle) -> str:
        own_mode = (bundle.target.streams or {}).get("mode")
        fits = own_mode == mode if mode else bundle.target.contract.streams
        return "" if fits else f"export a checkpoint that jetdraft train {verb} wrote"

    return lacks


def check_trees(*graphs: Graph) -> None:
    """Raise `OptionError` unless all of these graphs can run trees."""
    if not all(graph.contract.tree for graph in graphs):
        fact = "the bundle verifies chains only, since one of its models attends in "
        fact += "sliding windows or has recurrent states; leave the tree out"
        raise DraftingError(fact)
