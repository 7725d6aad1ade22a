"""Drafting with a head that fills a block from the target's states (2602.06036)."""

from jetdraft.runtime.proposers.drafter_methods import (
    SAMPLES,
    BlockOptions,
    blocks,
    drafter_method,
)

METHOD = drafter_method(
    "dflash",
    "a head that fills a block from the target's states",
    "a DFlash head",
    lambda contract, target: contract.block and contract.feature_input,
    make=blocks,
    options=BlockOptions,
    samples=(*SAMPLES, {"steps": 2}),
    alone={"confidence": 0.0},
    module=("jetdraft.methods.dflash.module:Dflash",),
    task="jetdraft.methods.dflash.task:DFlashTask",
)
