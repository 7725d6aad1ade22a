"""Drafting with layers over the target's own KV buffers (GliDe, 2402.02082)."""

from jetdraft.runtime.proposers.drafter_methods import token_drafter

METHOD = token_drafter(
    "glide",
    "layers that read the target's keys and values",
    "a GliDe drafter, or Gemma 4's assistant",
    lambda contract, target: contract.reads,
    module=(
        "jetdraft.methods.glide.module:Glide",
        "jetdraft.methods.glide.module:Assistant",
    ),
    task="jetdraft.methods.glide.task:GlideTask",
)
