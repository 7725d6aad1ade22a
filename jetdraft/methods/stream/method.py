"""Drafting by the target itself, in the pass that verifies.

Speculative Streaming (Bhendawade et al., 2402.11131): rows of the target carry probes.
A row predicts the next token, and its probes guess the tokens after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.contracts.constants import WIDEST
from jetdraft.errors import DraftingError
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.target import Target
from jetdraft.runtime.proposers.method import WALK, Method
from jetdraft.runtime.proposers.model_proposer import ProbeProposer
from jetdraft.runtime.proposers.proposer import Proposer, Traits
from jetdraft.runtime.proposers.tree_options import AUTO, TreeOptions

DROP_ALL = 2.0
"""A prune threshold that no probability reaches: only the root is verified."""


@dataclass(frozen=True)
class StreamOptions(TreeOptions):
    """The drafts of a target that drafts for itself, and how they are pruned.

    prune_threshold  drop drafted rows whose probability at the early exit is below
                     this; "auto" finds the threshold that pays most, None keeps all
                     rows
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


def _lacks(bundle: Bundle) -> str:
    if bundle.target.contract.streams:
        return ""
    return "export a checkpoint that jetdraft train stream wrote"


def _make(loaded: LoadedBundle, options: StreamOptions) -> Proposer:
    contract = loaded.target.contract
    shape = options.shape if options.branched else None
    branches = (
        contract.tree
        and options.may_branch
        and options.prune_threshold is None
        and not options.branched
    )
    chain = shape is None and not branches
    most = contract.streams if chain else contract.max_width - 1
    streams = contract.streams
    traits = Traits("stream", most, options.kind, probes=streams, branches=branches)
    return ProbeProposer(traits, shape)


def _target(
    loaded: LoadedBundle, options: StreamOptions, widths: Sequence[int]
) -> Target | None:
    """The target in halves, where rows are pruned between them."""
    threshold = options.prune_threshold
    if threshold is None:
        return None
    halves = loaded.pruned()
    halves.prepare(None if threshold == AUTO else float(threshold), widths)
    return halves


METHOD = Method(
    "stream",
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
    task="jetdraft.methods.stream.task:StreamTask",
)
