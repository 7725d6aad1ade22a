"""Drafting by the target itself, in the pass that verifies (2402.11131)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jetdraft.contracts.tensors import WIDEST
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.passes.answer import Target
from jetdraft.runtime.proposers.drafter_methods import lacks_probes, probe_proposer
from jetdraft.runtime.proposers.method import AUTO, WALK, Method, TreeOptions

DROP_ALL = 2.0  # No probability reaches it: only the root is verified.


@dataclass(frozen=True)
class StreamOptions(TreeOptions):
    """How a target that drafts for itself prunes drafts, by its early exit.

    prune_threshold  the least probability of a drafted row; "auto" finds what pays most
    """

    prune_threshold: float | str | None = None

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        threshold = self.prune_threshold
        in_range = isinstance(threshold, (int, float)) and 0.0 <= threshold <= 1.0
        if not in_range and threshold not in (None, AUTO, DROP_ALL):
            fact = f"prune threshold {threshold} is out of range"
            yield f"{fact}; give 0 (keep all) to 1, 2 (drop all) or auto"
        is_exact = self.verifier == WALK or self.checker.lossy
        if threshold is not None and not is_exact:
            fact = f"verifier {self.verifier!r} is not exact for a draft that was "
            yield f"{fact}pruned; leave the prune threshold out"

    @property
    def draft_size(self) -> int | None:
        """The rows of a tree; None with pruning, which drafts as much as it can."""
        size = super().draft_size
        return WIDEST - 1 if size is None and self.prune_threshold is not None else size


def _pruning_target(
    loaded: LoadedBundle, options: StreamOptions, widths: Sequence[int]
) -> Target | None:
    threshold = options.prune_threshold
    if threshold is None:
        return None
    loaded.pruned.prepare(None if threshold == AUTO else float(threshold), widths)
    return loaded.pruned


METHOD = Method(
    "stream",
    "the target itself, in the pass that verifies",
    lambda loaded, options: probe_proposer(
        "stream",
        loaded,
        options,
        branches=options.may_branch and options.prune_threshold is None,
    ),
    StreamOptions,
    lacks=lacks_probes("stream"),
    trees=True,
    reads_probes=True,
    cost="probes",
    target=_pruning_target,
    samples=(
        *({"tree": shape} for shape in ("best", "heap", "comb")),
        {"tree": "best", "prune_threshold": 0.05},
    ),
    task="jetdraft.methods.stream.task:StreamTask",
)
