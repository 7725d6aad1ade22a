"""Prompt lookup, and suffix decoding (2411.04975); see `LookupProposer`."""

from jetdraft.runtime.proposers.lookup import LookupProposer
from jetdraft.runtime.proposers.method import Method, MethodOptions

METHOD: Method[MethodOptions] = Method(
    "lookup",
    "what followed the last time the text ended like this",
    lambda loaded, options: LookupProposer(
        store=loaded.store_of(options.user),
        source=lambda: loaded.source,
        end=loaded.picture_token,
    ),
    cost="free",
)
