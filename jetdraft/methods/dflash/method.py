"""Drafting with a head that fills a block from the target's states (2602.06036)."""

from jetdraft.runtime.proposers.drafter_methods import block_drafter

METHOD = block_drafter(
    "dflash",
    "a head that fills a block from the target's states",
    "a DFlash head",
    lambda contract, target: contract.block and contract.feature_input,
    module=("jetdraft.methods.dflash.module:Dflash",),
    task="jetdraft.methods.dflash.task:DFlashTask",
)
