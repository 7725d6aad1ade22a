"""Drafting with a head of EAGLE (2401.15077) or MTP (2412.19437)."""

from jetdraft.runtime.proposers.drafter_methods import token_drafter

METHOD = token_drafter(
    "eagle",
    "a head that reads the target's own states",
    "a head of EAGLE or MTP",
    lambda contract, target: (
        contract.carried_size and not (contract.recent or contract.reads)
    ),
    module=("jetdraft.methods.eagle.module:Eagle", "jetdraft.methods.eagle.module:Mtp"),
    task="jetdraft.methods.eagle.task:EagleTask",
)
