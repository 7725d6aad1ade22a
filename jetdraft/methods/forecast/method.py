"""Drafting with forecasts: prompt tokens that see a learned prefix.

The form that Qualcomm's self-speculative decoding ships: in each pass ten rows are
verified, 1 + 3 + 6, and each of them carries two forecasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.bundle import Bundle
from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.proposers.method import Method
from jetdraft.runtime.proposers.model_proposer import ProbeProposer
from jetdraft.runtime.proposers.proposer import Proposer, Traits
from jetdraft.runtime.proposers.tree_options import AUTO, CHAIN, TreeOptions
from jetdraft.runtime.trees.shapes import Shape, Static

NAME = "forecast"
"""The method, and the mode of such probes in the manifest."""

BRANCHES, DEPTH = (0, 1, 0, 1, 0, 3, 5, 3, 5), 2
"""The parents of rows 1, 2, ...: three children of the root, and two below each. The
likeliest come first, so that a shorter draft has them."""


@dataclass(frozen=True)
class ForecastOptions(TreeOptions):
    """The drafts of forecasts; tree "auto" is the tree of branches 3 and 2."""

    @property
    def branched(self) -> bool:
        """Whether every draft branches."""
        return self.tree != CHAIN

    @property
    def shape(self) -> Shape:
        """A new shape, if drafts are `branched`."""
        return Static(BRANCHES) if self.tree == AUTO else super().shape

    @property
    def draft_size(self) -> int | None:
        """The rows of a tree; None for chains, whose length a controller chooses."""
        return len(BRANCHES) if self.tree == AUTO else super().draft_size


def _lacks(bundle: Bundle) -> str:
    streams = bundle.target.streams
    if streams is not None and streams["mode"] == NAME:
        return ""
    return "export a checkpoint that jetdraft train forecast wrote"


def _make(loaded: LoadedBundle, options: ForecastOptions) -> Proposer:
    contract = loaded.target.contract
    shape = options.shape if options.branched else None
    streams = contract.streams
    most = streams if shape is None else contract.max_width - 1
    probes = min(DEPTH, streams) if options.tree == AUTO else streams
    return ProbeProposer(Traits(NAME, most, options.kind, probes=probes), shape)


METHOD = Method(
    NAME,
    "forecasts of the target, which see a learned prefix",
    _make,
    ForecastOptions,
    lacks=_lacks,
    # It always drafts; "auto" drafts with the same probes where they pay, as `stream`.
    in_auto=lambda options: False,
    trees=True,
    reads_probes=True,
    samples=({"tree": "chain"}, {"tree": "best"}),
    task="jetdraft.methods.forecast.task:ForecastTask",
)
