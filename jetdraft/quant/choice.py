"""Chooses recipes: the cheapest that keeps a target's text, and a pair's fastest."""

import itertools
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import torch

from jetdraft.errors import OptionError
from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import RAISED, RUNGS, Recipe, Unit

KL_BOUND = 0.03  # The largest mean KL from the floats, in nats per token.
MIX_SHARE = 0.9  # A mix has less than this share of one scheme's bytes.
DRAFTER_CHOICES = {
    "jetdraft": ("q4_k-headq6_k", "q8_0"),
    "onnxruntime": ("int4-rtn-b32", "int8-rtn-b32"),
}
# The fixed cost of a pass in bytes: about 0.25 ms on two cores at 16 GB/s.
PASS_BYTES = 4e6
MAX_DRAFT_TOKENS = 8  # The longest draft for which the speed of a pair is computed.
# The acceptance rate that a drafter may lose by four bits, as a difference.
MAX_ACCEPTANCE_LOSS = 0.01


def choose_recipe(
    divergence: Divergence,
    kernel: str,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    bound: float = KL_BOUND,
) -> tuple[Recipe, float]:
    """Choose the cheapest recipe whose KL is at most `bound`; return it and its KL.

    It tries the `RUNGS` of a kernel, the cheapest first, then a mix of two. The KL is
    the mean in nats per token. `progress(stage, done, total)` precedes each step.
    """
    tried: list[Recipe] = []
    rungs = RUNGS[kernel]
    for done, name in enumerate(rungs):
        progress("measure recipes", done, len(rungs))
        divergence.drop_blocks()
        recipe = Recipe.parse(name)
        kl = divergence.mean_kl(recipe)
        if kl <= bound:
            break
        tried.append(recipe)
    progress("measure recipes", len(rungs), len(rungs))
    bases = [lower for lower in tried if RAISED.get(lower.scheme) == recipe.scheme]
    if bases:
        with suppress(OptionError):  # no mix is within the bound
            tell = partial(progress, "measure layers")
            sensitivity = Sensitivity(divergence, bases[-1])
            mix, mix_kl = sensitivity.find_mix(Limit(max_kl=bound), tell)
            if divergence.bytes_of(mix) < MIX_SHARE * divergence.bytes_of(recipe):
                return mix, mix_kl
    return recipe, kl


@dataclass(frozen=True)
class Limit:
    """The most bytes of matrices, or mean KL in nats per token: one of the two."""

    max_bytes: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if (self.max_bytes is None) == (self.max_kl is None):
            raise OptionError("a limit is one number; give either max bytes or max KL")
        if not (self.max_bytes or self.max_kl or 0) > 0:
            name = "max KL" if self.max_bytes is None else "max bytes"
            fact = f"{name} {self.max_bytes or self.max_kl or 0} is out of range"
            raise OptionError(f"{fact}; give more than 0")


class Sensitivity:
    """Finds mixes: recipes that give the most sensitive units more bits."""

    def __init__(self, divergence: Divergence, recipe: Recipe) -> None:
        self.divergence = divergence
        self.recipe = recipe

    def find_mix(
        self, limit: Limit, progress: Callable[[int, int], None] = lambda *state: None
    ) -> tuple[Recipe, float]:
        """Return a recipe in which some units have more bits, and its KL.

        With a limit of bytes as many units as fit; with a limit of KL as few as are
        enough. Raises `OptionError` if no mix meets the limit.
        """
        units = self.divergence.units
        candidates = [unit for unit in units if unit and self._added_bytes(unit)]
        kl_per_byte = {}
        for done, unit in enumerate(candidates, start=1):
            # One batch is enough to put the units in an order.
            alone = {unit: self.recipe.of_unit(unit)}
            kl = self.divergence.kl_of_units(alone, batches=1)
            kl_per_byte[unit] = kl / self._added_bytes(unit)
            progress(done, len(candidates))
        order = sorted(candidates, key=lambda unit: kl_per_byte[unit], reverse=True)
        if limit.max_bytes is not None:
            return self._mix_within_bytes(order, limit.max_bytes)
        assert limit.max_kl is not None
        return self._mix_within_kl(order, limit.max_kl)

    def _mix_within_bytes(self, order: list[Unit], most: int) -> tuple[Recipe, float]:
        """Raise each unit of `order` that still fits; return the mix and its KL."""
        size = self.divergence.bytes_of(self.recipe)
        if size > most:
            raise OptionError(
                f"{self.recipe.name} alone takes {size} bytes of matrices; allow "
                "that many, or choose fewer bits or larger blocks"
            )
        raised_units: list[Unit] = []
        for unit in order:
            more = self._added_bytes(unit)
            if size + more <= most:
                raised_units.append(unit)
                size += more
        recipe = self.recipe.raise_units(raised_units)
        return recipe, self.divergence.mean_kl(recipe)

    def _mix_within_kl(self, order: list[Unit], most: float) -> tuple[Recipe, float]:
        """Raise the fewest first units of `order` that reach a KL of `most`."""
        mixes: dict[int, tuple[Recipe, float]] = {}

        def enough(count: int) -> bool:
            recipe = self.recipe.raise_units(order[:count])
            mixes[count] = recipe, self.divergence.mean_kl(recipe)
            return mixes[count][1] <= most

        if not enough(len(order)):
            raise OptionError(
                f"{self.recipe.name} with more bits for all layers has a KL of "
                f"{mixes[len(order)][1]:.2g}; allow that much, or choose more bits or "
                "smaller blocks"
            )
        count = bisect_left(range(len(order)), True, key=enough)
        return mixes[count]

    def _added_bytes(self, unit: Unit) -> int:
        both = (self.recipe, self.recipe.raise_units([unit]))
        own = (recipe.of_unit(unit) for recipe in both)
        less, more = (self.divergence.bytes_of_unit(unit, recipe) for recipe in own)
        return more - less


class DrafterChoice(NamedTuple):
    """A drafter's recipe, and its acceptance: with the recipe, and in floats."""

    recipe: Recipe
    overlap: float
    full_overlap: float


def choose_drafter_recipe(
    target: Divergence,
    drafter: Divergence,
    target_recipe: Recipe,
    kernel: str,
    ids: torch.Tensor | None = None,
) -> DrafterChoice:
    """Choose the drafter's recipe with which the pair decodes fastest.

    With the acceptance a of a token, K drafted tokens give (1 - a^(K+1)) / (1 - a)
    tokens for a pass of the target and K of the drafter (Leviathan et al., 2211.17192,
    theorem 3.8). Four bits are taken at once if they cost less acceptance than
    `MAX_ACCEPTANCE_LOSS`. `ids` int64 [n] are all that it may draft, None for all.
    """
    pass_cost = PASS_BYTES + target.bytes_of(target_recipe)

    @cache
    def overlap(recipe: Recipe) -> float:
        drafter.drop_blocks()
        return min(drafter.overlap(recipe, target, ids), 1.0)

    def speed(recipe: Recipe) -> float:
        acceptance, step_cost = overlap(recipe), PASS_BYTES + drafter.bytes_of(recipe)
        powers = (acceptance**n for n in range(MAX_DRAFT_TOKENS + 1))
        tokens = enumerate(itertools.accumulate(powers))
        return max(x / (pass_cost + k * step_cost) for k, x in tokens if k)

    full = overlap(Recipe("none"))
    small, large = map(Recipe.parse, DRAFTER_CHOICES[kernel])
    if full - overlap(small) < MAX_ACCEPTANCE_LOSS or speed(small) >= speed(large):
        return DrafterChoice(small, overlap(small), full)
    mixed = replace(large, head=small.scheme)
    recipe = mixed if overlap(large) - overlap(mixed) < MAX_ACCEPTANCE_LOSS else large
    return DrafterChoice(recipe, overlap(recipe), full)
