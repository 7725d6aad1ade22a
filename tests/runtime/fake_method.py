"""Proposers of tests: a generation that has one only, and one over a graph."""

from jetdraft.methods import Method, registered
from jetdraft.runtime.drafters.draft_cache import DraftCache
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.generation import Generation
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.proposers.model_proposer import ModelProposer
from jetdraft.runtime.proposers.proposer import Traits
from jetdraft.runtime.text.codec import TextStream
from jetdraft.runtime.text.stops import Ending, StopWatcher

NAME = "fake"


def pieces_of(
    model,
    prompt,
    sampling,
    proposer=None,
    length=7,
    tokens=200,
    eos=(),
    exact=True,
    widths=None,
    verifier=None,
):
    """All pieces of a generation of a whole prompt, and its stats."""
    method = Method(NAME, "what a test proposes", lambda parts, options: proposer)
    with registered(method):
        drafting = Drafting("none", exact=exact)
        if proposer is not None:
            drafting = Drafting(NAME, length, exact)
        options = Options(sampling, drafting=drafting, ending=Ending(tokens))
        ids = [int(token) for token in prompt]
        generation = Generation(model.parts, model.planner, ids, options)
        generation.watcher = StopWatcher(TextStream(None, [], eos), eos)
        generation.widths = widths or generation.widths
        generation.verifier = verifier or generation.verifier
        model.parts.prefix.forget()
        try:
            return list(generation.run()), generation.stats
        finally:
            model.parts.prefix.forget()


def tokens_of(model, prompt, sampling, proposer=None, **options):
    pieces, stats = pieces_of(model, prompt, sampling, proposer, **options)
    return [token for piece in pieces for token in piece.token_ids], stats


def drafter_of(graph, name="draft"):
    """A proposer of chains as `draft` makes, over a graph that no other uses."""
    widest = graph.contract.max_width - 1
    return ModelProposer(DraftCache(graph), Traits(name, widest, Kind.COUPLED))
