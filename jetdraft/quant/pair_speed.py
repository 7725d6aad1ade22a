"""Chooses a drafter's recipe by the speed of the pair."""

from __future__ import annotations

from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import Recipe

CHOICES = ("int4-rtn-b32", "int8-rtn-b32")

FIXED_BYTES = 4e6
"""What else a pass costs, in bytes that the memory could have delivered: on two cores
at 16 GB/s about 0.25 ms."""

MOST_TOKENS = 8


def choose_drafter(
    target: Divergence, drafter: Divergence, target_recipe: Recipe
) -> Recipe:
    """The recipe with which a pair decodes the most tokens in the time of its passes.

    A pass takes the time that its bytes take. With the acceptance a of a token, K
    drafted tokens give (1 - a^(K+1)) / (1 - a) tokens for one pass of the target and K
    of the drafter (Leviathan et al., 2211.17192, theorem 3.8), at the best K.

        choose_drafter(target, drafter, Recipe.parse("int4-rtn-b32-head8"))
    """
    pass_cost = FIXED_BYTES + target.bytes_of(target_recipe)

    def speed(recipe: Recipe) -> float:
        acceptance = drafter.overlap(recipe, target)
        drafter.forget()
        step_cost = FIXED_BYTES + drafter.bytes_of(recipe)
        return max(
            sum(acceptance**n for n in range(count + 1))
            / (pass_cost + count * step_cost)
            for count in range(1, MOST_TOKENS + 1)
        )

    return max(map(Recipe.parse, CHOICES), key=speed)
