"""Chooses a drafter's recipe by the speed of the pair and the drafter's acceptance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import Recipe

CHOICES = ("int4-rtn-b32", "int8-rtn-b32")

FIXED_BYTES = 4e6
"""What else a pass costs, in bytes that the memory could have delivered: on two cores
at 16 GB/s about 0.25 ms."""

MOST_TOKENS = 8

MOST_FALL = 0.01
"""The share of accepted tokens that integers of four bits may cost."""


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter's recipe, and the share of its tokens that the target accepts.

    `full_overlap` is that of the drafter in floats.
    """

    recipe: Recipe
    overlap: float
    full_overlap: float

    @property
    def overlaps(self) -> dict[str, float]:
        """What the manifest says of them."""
        return {
            "overlap": round(self.overlap, 4),
            "full_overlap": round(self.full_overlap, 4),
        }


def choose_drafter(
    target: Divergence,
    drafter: Divergence,
    target_recipe: Recipe,
    ids: torch.Tensor | None = None,
) -> DrafterChoice:
    """The recipe with which a pair decodes the most tokens in the time of its passes.

    A pass takes the time that its bytes take. With the acceptance a of a token, K
    drafted tokens give (1 - a^(K+1)) / (1 - a) tokens for one pass of the target and K
    of the drafter (Leviathan et al., 2211.17192, theorem 3.8), at the best K. Four bits
    that cost less acceptance than `MOST_FALL` are taken at once, for the whole drafter
    or for its LM head. A drafter may choose among the tokens `ids` only.

        choose_drafter(target, drafter, Recipe.parse("int4-rtn-b32-head8")).recipe
    """
    pass_cost = FIXED_BYTES + target.bytes_of(target_recipe)

    @cache
    def overlap(recipe: Recipe) -> float:
        share = drafter.overlap(recipe, target, ids)
        drafter.forget()
        return min(share, 1.0)

    def speed(recipe: Recipe) -> float:
        acceptance, step_cost = overlap(recipe), FIXED_BYTES + drafter.bytes_of(recipe)
        return max(
            sum(acceptance**n for n in range(count + 1))
            / (pass_cost + count * step_cost)
            for count in range(1, MOST_TOKENS + 1)
        )

    full = overlap(Recipe("none"))
    small, large = map(Recipe.parse, CHOICES)
    if full - overlap(small) < MOST_FALL or speed(small) >= speed(large):
        return DrafterChoice(small, overlap(small), full)
    mixed = replace(large, head=small.scheme)
    recipe = mixed if overlap(large) - overlap(mixed) < MOST_FALL else large
    return DrafterChoice(recipe, overlap(recipe), full)
