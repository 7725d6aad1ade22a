"""Prompt lookup, and suffix decoding (2411.04975); see `LookupProposer`."""

from jetdraft.runtime.loaded import LoadedBundle
from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions
from jetdraft.runtime.proposers.proposer import Proposer


def _make_proposer(loaded: LoadedBundle, options: MethodOptions) -> Proposer:
    store = loaded.store_of(options.user)
    return LookupProposer(store=store, source=lambda: loaded.source)


METHOD = Method(
    "lookup",
    "what followed the last time the text ended like this",
    _make_proposer,
    cost="free",
)
