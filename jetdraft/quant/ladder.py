"""Chooses a recipe for a target: the cheapest that keeps its text."""

from __future__ import annotations

from collections.abc import Callable

from jetdraft.errors import OptionError
from jetdraft.quant.divergence import Divergence
from jetdraft.quant.sensitivity import Limit, Sensitivity
from jetdraft.recipe import Recipe

BOUND = 0.03
"""The largest mean KL divergence from the unquantized model, in nats per token."""

RUNGS = ("int4-rtn-b128-head8", "int4-rtn-b64-head8", "int4-rtn-b32-head8")
"""From the cheapest on: larger blocks are faster and move a model further."""

TOP = "int8-rtn-b32"
"""The last rung, and what is taken without a measure; it kept every model so far."""

EIGHT_BITS = ("int8-rtn-b64", TOP)
"""What is taken where four bits are not enough: the first that is within the bound."""

WORTH = 0.9
"""A mix must have fewer bytes than this share of eight bits, or those are taken."""


def choose(
    divergence: Divergence,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    bound: float = BOUND,
) -> tuple[Recipe, float]:
    """The cheapest recipe whose KL is at most `bound`, and its KL.

    First the rungs from the top down, as long as they hold; if none holds, a mix of
    four and eight bits, or eight bits. `progress(stage, done, total)` is called after
    each step.

        recipe, kl = choose(Divergence(model, windows, {}))
    """
    chosen: tuple[Recipe, float] | None = None
    for done, name in enumerate(reversed(RUNGS), start=1):
        recipe = Recipe.parse(name)
        kl = divergence.of(recipe)
        divergence.forget()
        if kl > bound:
            break
        chosen = recipe, kl
        progress("measure recipes", done, len(RUNGS))
    progress("measure recipes", len(RUNGS), len(RUNGS))
    return chosen or _mix(divergence, progress, bound)


def _mix(
    divergence: Divergence, progress: Callable[[str, int, int], None], bound: float
) -> tuple[Recipe, float]:
    """The mix with the fewest bytes that meets the bound, if it is worth its name."""
    top, top_kl = _eight_bits(divergence, progress, bound)
    try:
        mix, kl = Sensitivity(divergence, Recipe.parse(RUNGS[-1])).mixed(
            Limit(max_kl=bound),
            lambda done, total: progress("measure layers", done, total),
        )
    except OptionError:
        return top, top_kl
    worth = divergence.bytes_of(mix) < WORTH * divergence.bytes_of(top)
    return (mix, kl) if worth else (top, top_kl)


def _eight_bits(
    divergence: Divergence, progress: Callable[[str, int, int], None], bound: float
) -> tuple[Recipe, float]:
    """The first of `EIGHT_BITS` within the bound, or else the last."""
    for done, recipe in enumerate(map(Recipe.parse, EIGHT_BITS), start=1):
        kl = divergence.of(recipe)
        divergence.forget()
        progress("measure eight bits", done, len(EIGHT_BITS))
        if kl <= bound:
            break
    return recipe, kl
