"""Drafting with a second, small model, the drafter (Leviathan et al., 2211.17192)."""

from jetdraft.runtime.proposers.drafter_methods import (
    DraftOptions,
    drafter_method,
    drafts,
)

METHOD = drafter_method(
    "draft",
    "the drafter",
    "a drafter",
    lambda contract, target: contract.stands_alone,
    make=drafts,
    options=DraftOptions,
    flag="--drafter",
    cost="drafter",
    alone={},
    task="jetdraft.methods.draft.task:ModelTask",
)
