"""Drafting with a model over source and text (Spec-Drafter, 2203.16487)."""

from jetdraft.runtime.proposers.drafter_methods import block_drafter

METHOD = block_drafter(
    "block",
    "the drafter of an encoder-decoder, which fills a block",
    "a drafter of train block",
    lambda contract, target: (
        contract.block and contract.source_slots and not contract.feature_input
    ),
    module=("jetdraft.methods.block.module:SourceDrafter",),
    task="jetdraft.methods.block.task:SourceBlockTask",
)
