"""Drafting with forecasts, prompt tokens that see a learned prefix (Qualcomm)."""

from dataclasses import dataclass

from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.proposers.drafter_methods import lacks_probes, probe_proposer
from jetdraft.runtime.proposers.method import AUTO, CHAIN, Method, TreeOptions
from jetdraft.runtime.proposers.proposer import Proposer
from jetdraft.runtime.trees.shapes import Shape, Static

NAME = "forecast"  # The method, and the mode of such probes in the manifest.
# The parents of rows 1, 2, ...; the likeliest come first, which a shorter draft keeps.
BRANCHES, DEPTH = (0, 1, 0, 1, 0, 3, 5, 3, 5), 2


@dataclass(frozen=True)
class ForecastOptions(TreeOptions):
    """The drafts of forecasts; tree "auto" is the tree of branches 3 and 2."""

    @property
    def branched(self) -> bool:
        return self.tree != CHAIN

    @property
    def shape(self) -> Shape:
        return Static(BRANCHES) if self.tree == AUTO else super().shape

    @property
    def draft_size(self) -> int | None:
        return len(BRANCHES) if self.tree == AUTO else super().draft_size


def _make_proposer(loaded: LoadedBundle, options: ForecastOptions) -> Proposer:
    streams = loaded.target.contract.streams
    probes = min(DEPTH, streams) if options.tree == AUTO else streams
    return probe_proposer(NAME, loaded, options, probes)


METHOD = Method(
    NAME,
    "forecasts of the target, which see a learned prefix",
    _make_proposer,
    ForecastOptions,
    lacks=lacks_probes(NAME, mode=NAME),
    in_auto=lambda options: False,
    trees=True,
    reads_probes=True,
    samples=({"tree": "chain"}, {"tree": "best"}),
    task="jetdraft.methods.forecast.task:ForecastTask",
)
