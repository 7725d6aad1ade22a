"""Mixed precision: finds the layers that need twice the bits.

The units are a model's decoder layers and its head. Each unit is quantized alone; the
KL divergence from the unquantized model is its sensitivity. The units with the most KL
per further byte get twice the bits, until all units together meet a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jetdraft.errors import OptionError
from jetdraft.quant.divergence import Divergence
from jetdraft.recipe import Recipe, Unit


@dataclass(frozen=True)
class Limit:
    """What a mix must not exceed: bytes of matrices, or mean KL in nats per token.

    Exactly one must be given, above 0; raises `OptionError` otherwise.

        Limit(max_kl=0.01)
    """

    max_bytes: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if (self.max_bytes is None) == (self.max_kl is None):
            raise OptionError("a limit is one number; give either max bytes or max KL")
        if not (self.max_bytes or self.max_kl or 0) > 0:
            name = "max KL" if self.max_bytes is None else "max bytes"
            raise OptionError(
                f"{name} {self.max_bytes or self.max_kl or 0} is out of range; give "
                "more than 0"
            )


class Sensitivity:
    """Finds mixes of a recipe and its raised form.

    Sensitivity(Divergence(model, windows, {}), Recipe()).mixed(Limit(max_kl=0.01))
    """

    def __init__(self, divergence: Divergence, recipe: Recipe) -> None:
        self.divergence = divergence
        self.recipe = recipe

    def mixed(
        self,
        limit: Limit,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Recipe, float]:
        """A recipe in which some units have twice the bits, and its KL.

        With a limit of bytes, as many units as fit; with a limit of KL, as few units as
        meet it.

        `progress(done, total)` is called after each unit. Raises `OptionError` if no
        mix meets the limit.
        """
        units = self.divergence.units
        candidates = [unit for unit in units if unit and self._more_bytes(unit)]
        kl_per_byte = {}
        for done, unit in enumerate(candidates, start=1):
            # One batch is enough to put the units in an order.
            kl = self.divergence.of_units({unit: self.recipe.of_unit(unit)}, batches=1)
            kl_per_byte[unit] = kl / self._more_bytes(unit)
            progress(done, len(candidates))
        order = sorted(candidates, key=lambda unit: kl_per_byte[unit], reverse=True)
        if limit.max_bytes is not None:
            return self._within_bytes(order, limit.max_bytes)
        assert limit.max_kl is not None
        return self._within_kl(order, limit.max_kl)

    def _within_bytes(self, order: list[Unit], most: int) -> tuple[Recipe, float]:
        """Raise as many units as fit, in this order."""
        size = self.divergence.bytes_of(self.recipe)
        if size > most:
            raise OptionError(
                f"{self.recipe.name} alone takes {size} bytes of matrices; allow "
                "that many, or choose fewer bits or larger blocks"
            )
        raised_units: list[Unit] = []
        for unit in order:
            more = self._more_bytes(unit)
            if size + more <= most:
                raised_units.append(unit)
                size += more
        recipe = self.recipe.raise_units(raised_units)
        return recipe, self.divergence.of(recipe)

    def _within_kl(self, order: list[Unit], most: float) -> tuple[Recipe, float]:
        """Raise the fewest units that are enough, in this order, by bisection."""
        mixes: dict[int, tuple[Recipe, float]] = {}

        def enough(count: int) -> bool:
            recipe = self.recipe.raise_units(order[:count])
            mixes[count] = recipe, self.divergence.of(recipe)
            return mixes[count][1] <= most

        if not enough(len(order)):
            raise OptionError(
                f"{self.recipe.name} with twice the bits for all layers has a KL of "
                f"{mixes[len(order)][1]:.2g}; allow that much, or choose more bits or "
                "smaller blocks"
            )
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if enough(middle):
                high = middle
            else:
                low = middle + 1
        return mixes[high]

    def _more_bytes(self, unit: Unit) -> int:
        """How many bytes a unit takes more with twice the bits."""
        recipes = self.recipe, self.recipe.raise_units([unit])
        less, more = (
            self.divergence.bytes_of_unit(unit, recipe.of_unit(unit))
            for recipe in recipes
        )
        return more - less
