"""Drafting with a model over source and text (Spec-Drafter, 2203.16487)."""

from jetdraft.runtime.proposers.drafter_methods import (
    SAMPLES,
    BlockOptions,
    blocks,
    drafter_method,
)

METHOD = drafter_method(
    "block",
    "the drafter of an encoder-decoder, which fills a block",
    "a drafter of train block",
    lambda contract, target: (
        contract.block and contract.source_slots and not contract.feature_input
    ),
    make=blocks,
    options=BlockOptions,
    samples=(*SAMPLES, {"steps": 2}),
    alone={"confidence": 0.0},
    module=("jetdraft.methods.block.module:SourceDrafter",),
    task="jetdraft.methods.block.task:SourceBlockTask",
)
