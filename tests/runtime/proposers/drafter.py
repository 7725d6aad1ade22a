"""A proposer of chains, over a graph that no other proposer uses."""

from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.proposers.model_proposer import ModelProposer
from jetdraft.runtime.proposers.proposer import Traits


def drafter_of(graph, name="draft"):
    """Drafts as method `draft` does."""
    widest = graph.contract.max_width - 1
    return ModelProposer(DraftCache(graph), Traits(name, widest, Kind.COUPLED))
