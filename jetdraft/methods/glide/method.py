"""Drafting with a layer over the target's own KV buffers (GliDe, 2402.02082)."""

from jetdraft.runtime.proposers.drafter_methods import token_drafter

METHOD = token_drafter(
    "glide",
    "a layer that reads the target's keys and values",
    "a GliDe drafter",
    lambda contract, target: contract.reads,
    module=("jetdraft.methods.glide.module:Glide",),
    task="jetdraft.methods.glide.task:GlideTask",
)
