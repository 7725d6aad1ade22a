"""Mixed precision: which layers need twice the bits.

The units are a model's decoder layers and its head. Each unit is quantized alone; the
KL divergence to the full model is its sensitivity. The units that lower the KL most per
byte get twice the bits, until a limit is met, which is measured with all units
together. Everything runs in float arithmetic; int8 activations add to the KL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from jetdraft.errors import OptionError
from jetdraft.quant.algorithms import quantize
from jetdraft.quant.blocks import Blocks, Floats
from jetdraft.quant.calibration import Windows
from jetdraft.recipe import HEAD, SYMMETRIC, Recipe, Unit, unit_of

TOKENS = 512
"""Tokens of the text that are compared; their logits stay in memory."""


@dataclass(frozen=True)
class Limit:
    """The most that a mix may cost: bytes of matrices, or mean KL in nats per token.

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
                f"{name} {self.max_bytes or self.max_kl or 0} cannot be met; give more "
                "than 0"
            )


class Sensitivity:
    """Measures mixes of a recipe and its raised form on a torch model.

    `moments` are the result of `second_moments`, for algorithms that need them.

        Sensitivity(model, Recipe(), windows, {}).mixed(Limit(max_kl=0.01))
    """

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        windows: Windows,
        moments: Mapping[str, Floats],
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.moments = moments
        length = min(TOKENS, windows.ids.shape[1])
        self.ids = windows.ids[: TOKENS // length, :length]
        self.units: dict[Unit, dict[str, torch.nn.Linear]] = {}
        head = model.get_output_embeddings()
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                unit = HEAD if layer is head else unit_of(name)
                self.units.setdefault(unit, {})[f"{name}.weight"] = layer
            else:
                _check_measurable(name, layer)
        self._blocks: dict[tuple[str, Recipe], Blocks] = {}
        self._full = self._logs()

    def kl(self, recipes: Mapping[Unit, Recipe]) -> float:
        """The mean KL in nats per token when only these units are quantized."""
        with self._quantized(recipes):
            logs = self._logs()
        return float((self._full.exp() * (self._full - logs)).sum(-1).mean())

    def mixed(
        self,
        limit: Limit,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Recipe, float]:
        """The recipe that meets a limit, and its KL.

        `progress(done, total)` is called after each unit. Raises `OptionError` if no
        mix meets the limit.
        """
        candidates = [unit for unit in self.units if unit and self._more_bytes(unit)]
        gain = {}
        for done, unit in enumerate(candidates, start=1):
            alone = self.kl({unit: self.recipe.of_unit(unit)})
            gain[unit] = alone / self._more_bytes(unit)
            progress(done, len(candidates))
        order = sorted(candidates, key=lambda unit: gain[unit], reverse=True)
        if limit.max_bytes is not None:
            return self._within_bytes(order, limit.max_bytes)
        assert limit.max_kl is not None
        return self._within_kl(order, limit.max_kl)

    def bytes_of(self, recipe: Recipe) -> int:
        """The bytes of all quantized matrices and their scales."""
        return sum(
            _bytes(layer, recipe.of_unit(unit))
            for unit, layers in self.units.items()
            for layer in layers.values()
        )

    def _within_bytes(self, order: list[Unit], most: int) -> tuple[Recipe, float]:
        """Raise as many units as fit, in this order."""
        least = self.bytes_of(self.recipe)
        if least > most:
            raise OptionError(
                f"{self.recipe.name} alone takes {least} bytes of matrices; allow "
                "that many, or choose fewer bits or larger blocks"
            )
        chosen: list[Unit] = []
        for unit in order:
            least += self._more_bytes(unit)
            if least <= most:
                chosen.append(unit)
            else:
                least -= self._more_bytes(unit)
        recipe = self.recipe.raise_units(chosen)
        return recipe, self._kl_of(recipe)

    def _within_kl(self, order: list[Unit], most: float) -> tuple[Recipe, float]:
        """Raise the fewest units that are enough, in this order, by bisection."""
        mixes: dict[int, tuple[Recipe, float]] = {}

        def enough(count: int) -> bool:
            recipe = self.recipe.raise_units(order[:count])
            mixes[count] = recipe, self._kl_of(recipe)
            return mixes[count][1] <= most

        if not enough(len(order)):
            raise OptionError(
                f"{self.recipe.name} with more bits for all has a KL of "
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

    def _kl_of(self, recipe: Recipe) -> float:
        return self.kl({unit: recipe.of_unit(unit) for unit in self.units})

    def _more_bytes(self, unit: Unit) -> int:
        raised = self.recipe.raise_units([unit])
        return sum(
            _bytes(layer, raised.of_unit(unit))
            - _bytes(layer, self.recipe.of_unit(unit))
            for layer in self.units[unit].values()
        )

    def _blocks_of(self, name: str, layer: torch.nn.Linear, recipe: Recipe) -> Blocks:
        key = name, recipe
        if key not in self._blocks:
            matrix = layer.weight.detach().float().numpy().T
            self._blocks[key] = quantize(matrix, recipe, self.moments.get(name))
        return self._blocks[key]

    @contextmanager
    def _quantized(self, recipes: Mapping[Unit, Recipe]) -> Iterator[None]:
        """Replace weights by the floats that their integers stand for."""
        originals = []
        try:
            for unit, recipe in recipes.items():
                for name, layer in self.units[unit].items():
                    if recipe.bits is None:
                        continue
                    blocks = self._blocks_of(name, layer, recipe)
                    originals.append((layer, layer.weight.data))
                    layer.weight.data = torch.from_numpy(blocks.floats.T).to(
                        self._dtype
                    )
            yield
        finally:
            # Backwards: two layers may share a weight.
            for layer, original in reversed(originals):
                layer.weight.data = original

    def _logs(self) -> torch.Tensor:
        """Log probabilities, float32 [windows, length, vocab]."""
        with torch.no_grad():
            rows = [self.model(ids[None], use_cache=False).logits for ids in self.ids]
        self._dtype = rows[0].dtype
        return torch.cat(rows).float().log_softmax(-1)


def _check_measurable(name: str, module: torch.nn.Module) -> None:
    """Refuse matrices outside of linear layers: no unit would measure them."""
    weights = module.named_parameters(recurse=False)
    matrices = [weight_name for weight_name, weight in weights if weight.dim() > 1]
    if matrices and not isinstance(module, torch.nn.Embedding):
        raise OptionError(
            f"{name}.{matrices[0]} does not belong to a linear layer, so its "
            "sensitivity cannot be measured; leave the limit out"
        )


def _bytes(layer: torch.nn.Linear, recipe: Recipe) -> int:
    """The bytes of a layer's integers, float32 scales and zeros, or of its floats."""
    columns, rows = layer.weight.shape
    if recipe.bits is None:
        return columns * rows * torch.float32.itemsize
    blocks = -(-rows // recipe.block_size)
    integers = columns * blocks * recipe.block_size * recipe.bits // 8
    zeros = 0
    if recipe.algorithm not in SYMMETRIC:
        zeros = columns * -(-blocks * recipe.bits // 8)
    return integers + columns * blocks * torch.float32.itemsize + zeros
