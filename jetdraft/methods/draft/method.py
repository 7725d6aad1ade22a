"""Drafting with a second, small model, the drafter (Leviathan et al., 2211.17192)."""

from jetdraft.runtime.proposers.drafter_methods import token_drafter

METHOD = token_drafter(
    "draft",
    "the drafter",
    "a drafter",
    lambda contract, target: contract.stands_alone,
    flag="--drafter",
    task="jetdraft.methods.draft.task:ModelTask",
)
