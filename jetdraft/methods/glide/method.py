"""Drafting with a layer over the target's own KV buffers (GliDe, 2402.02082).

The buffers are bound once, and only read.
"""

from jetdraft.runtime.proposers.drafter_methods import (
    DraftOptions,
    drafter_method,
    drafts,
)

METHOD = drafter_method(
    "glide",
    "a layer that reads the target's keys and values",
    "a GliDe drafter",
    lambda contract, target: contract.reads,
    make=drafts,
    options=DraftOptions,
    cost="drafter",
    alone={},
    module=("jetdraft.methods.glide.module:Glide",),
    task="jetdraft.methods.glide.task:GlideTask",
)
