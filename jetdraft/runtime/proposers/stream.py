"""Drafting by the target itself, in the pass that verifies.

Speculative Streaming (Bhendawade et al., 2402.11131): rows of the target carry probes.
A row predicts the next token, and its probes guess the tokens after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.contracts.constants import WIDEST
from jetdraft.errors import DraftingError, OptionError
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.target import Target
from jetdraft.runtime.proposers.guessing.guess_proposer import GuessProposer
from jetdraft.runtime.proposers.method import WALK, Method
from jetdraft.runtime.proposers.parts import Parts
from jetdraft.runtime.proposers.proposer import Proposer, Seen, Tokens, Traits
from jetdraft.runtime.proposers.tree_options import AUTO, TreeOptions
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.runtime.trees.shape import Shape

NAME = "stream"

DROP_ALL = 2.0
"""A prune threshold that no probability reaches: only the root is verified."""


@dataclass(frozen=True)
class StreamOptions(TreeOptions):
    """The drafts of a target that drafts for itself, and how they are pruned.

    prune_threshold  drop drafted rows whose probability at the early exit is below
                     this; "auto" finds the threshold that pays most, None keeps all
                     rows

        StreamOptions(tree="best", prune_threshold=0.05)
    """

    prune_threshold: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold = self.prune_threshold
        if threshold is None:
            return
        in_range = isinstance(threshold, (int, float)) and 0.0 <= threshold <= 1.0
        if not in_range and threshold not in (AUTO, DROP_ALL):
            raise DraftingError(
                f"prune threshold {threshold} is out of range; give 0 (keep all) to 1, "
                "2 (drop all) or auto"
            )
        if self.verifier != WALK and not self.checker.lossy:
            raise DraftingError(
                f"verifier {self.verifier!r} is not exact for a draft that was pruned; "
                "leave the prune threshold out"
            )

    @property
    def draft_size(self) -> int | None:
        """The rows of a tree; with pruning a draft is always as long as possible.

        A controller cannot plan it, since it does not know the pass times of halves.
        """
        size = super().draft_size
        return WIDEST - 1 if size is None and self.prune_threshold is not None else size


class StreamProposer(GuessProposer):
    """Drafts the tokens that the probes of the last accepted row guessed, at no cost.

    The last token of the context is the choice of that row; probe j guesses the token j
    places after it. Without a `shape` the draft is a chain, or with `branches` a tree
    if a controller asks for a tree.

        StreamProposer(parts.target).propose(context, budget=4)
    """

    def __init__(
        self,
        graph: Graph,
        shape: Shape | None = None,
        kind: Kind = Kind.COUPLED,
        branches: bool = True,
        name: str = NAME,
    ) -> None:
        streams = graph.contract.streams
        branches = branches and graph.contract.tree and shape is None
        chain = shape is None and not branches
        most = streams if chain else graph.contract.max_width - 1
        super().__init__(
            Traits(name, most, kind, probes=streams, branches=branches), shape
        )
        self._ready: tuple[int, Answer] | None = None

    def begin(self, prompt: Sequence[int], chooser: Chooser) -> None:
        """Forget the last sequence."""
        super().begin(prompt, chooser)
        self._ready = None

    def guesses(self, context: Tokens) -> Answer | None:
        """What the probes of the last pass guessed, if it had probes."""
        if self._ready is None or self._ready[0] != len(context):
            return None
        return self._ready[1]

    def observe(self, seen: Seen) -> None:
        """Keep the answer of the probes of the last accepted row."""
        probes = seen.answer.probes.get(seen.path[-1])
        self._ready = None if probes is None else (seen.length, probes)


def _lacks(bundle: Bundle) -> str:
    if bundle.target.contract.streams:
        return ""
    return "export a checkpoint that jetdraft train streams wrote"


def _make(parts: Parts, options: StreamOptions) -> Proposer:
    if reason := _lacks(parts.bundle):
        raise OptionError(reason, "method")
    branches = options.may_branch and options.prune_threshold is None
    shape = options.shape if options.branched else None
    return StreamProposer(parts.target, shape, options.kind, branches)


def _target(
    parts: Parts, options: StreamOptions, widths: Sequence[int]
) -> Target | None:
    """The target in halves, where rows are pruned between them."""
    threshold = options.prune_threshold
    if threshold is None:
        return None
    halves = parts.pruned()
    halves.prepare(None if threshold == AUTO else float(threshold), widths)
    return halves


METHOD = Method(
    NAME,
    "the target itself, in the pass that verifies",
    _make,
    StreamOptions,
    lacks=_lacks,
    trees=True,
    reads_probes=True,
    cost="probes",
    target=_target,
    samples=(
        {"tree": "best"},
        {"tree": "heap"},
        {"tree": "comb"},
        {"tree": "best", "prune_threshold": 0.05},
    ),
)
