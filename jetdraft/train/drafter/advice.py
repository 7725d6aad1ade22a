"""What size a drafter should have, and how many tokens it should see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jetdraft.devices.planning.cost_model import Dimensions, Load
from jetdraft.devices.planning.drafter_advice import SHARE, TOKENS_PER_WEIGHT
from jetdraft.recipe import Recipe

__all__ = ["SHARE", "advised_tokens", "cost_share"]

CONTEXT = 1024
"""Tokens in both caches."""


def cost_share(
    drafter: Mapping[str, Any], target: Mapping[str, Any], draft_vocab: int | None
) -> float:
    """What a draft step reads, as a share of what a pass of the target reads.

    Both are fields of a config.json. By the model of `jetdraft plan`, with int4 weights
    in the target and int8 in the drafter, which can draft `draft_vocab` tokens or all.
    Raises `CheckpointError` for a config that cannot be planned.
    """
    small = Dimensions.of(dict(drafter))
    if draft_vocab is not None:
        rows = max(draft_vocab, drafter["vocab_size"])
        small = replace(small, head=small.head * draft_vocab // rows)
    recipe = Recipe()
    read = Load(small, Recipe.for_drafter(recipe)).pass_bytes(CONTEXT)
    return read / Load(Dimensions.of(dict(target)), recipe).pass_bytes(CONTEXT)


def advised_tokens(weights: int) -> int:
    """The tokens that a drafter of so many weights should see."""
    return TOKENS_PER_WEIGHT * weights
