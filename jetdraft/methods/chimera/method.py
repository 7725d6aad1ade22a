"""Drafting with the last three tokens and the features of all rows (2402.15758)."""

from jetdraft.runtime.proposers.drafter_methods import token_drafter

METHOD = token_drafter(
    "chimera",
    "three tokens, and a layer over all of the target's states",
    "a Chimera drafter",
    lambda contract, target: contract.recent and not contract.ahead,
    module=("jetdraft.methods.chimera.module:Chimera",),
    task="jetdraft.methods.chimera.task:ChimeraTask",
)
