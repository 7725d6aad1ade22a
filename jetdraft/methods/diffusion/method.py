"""Drafting with a small masked diffusion model over the text (SpecDiff, 2408.05636)."""

from jetdraft.runtime.proposers.drafter_methods import block_drafter

METHOD = block_drafter(
    "diffusion",
    "a small diffusion model that fills a block",
    "a diffusion drafter",
    lambda contract, target: (
        contract.block and not (contract.feature_input or contract.source_slots)
    ),
    module=("jetdraft.methods.diffusion.module:Diffusion",),
    task="jetdraft.methods.diffusion.task:DiffusionTask",
)
