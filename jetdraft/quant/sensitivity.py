"""Mixed precision: which layers need more bits, by what each costs when alone.

The units are a model's decoder layers and its head. Each is quantized alone, and the KL
divergence to the full model is how sensitive it is. More bits go to those that give
back the most for their bytes, until a limit is met; whether it is, is measured with all
units together. In float arithmetic: what int8 activations cost comes on top.
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
"""How many of the text are compared; their logits are kept."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Limit:
    """What a mix may cost: bytes of quantized matrices, or mean KL in nats per token.

    One of both is None.

        Limit(max_kl=0.01)
    """

    max_bytes: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        if (self.max_bytes is None) == (self.max_kl is None):
            raise OptionError("give either max bytes or max KL, not both")
        if not (self.max_bytes or self.max_kl or 0) > 0:
            name = "max KL" if self.max_bytes is None else "max bytes"
            raise OptionError(
                f"{name} {self.max_bytes or self.max_kl or 0} cannot be met; give more "
                "than 0"
            )


class Sensitivity:
    """Measures mixes of a recipe and its raised form on a model of torch.

    `moments` as `second_moments` gives them, for algorithms that look at them.

        Sensitivity(model, Recipe(), windows, {}).mixed(Limit(max_kl=0.01)).name
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
        self._tied = head.weight is model.get_input_embeddings().weight
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear):
                unit = HEAD if layer is head else unit_of(name)
                self.units.setdefault(unit, {})[f"{name}.weight"] = layer
            else:
                _check_measurable(name, layer)
        self._blocks: dict[tuple[str, Recipe], Blocks] = {}
        self._full = self._logs()

    def kl(self, recipes: Mapping[Unit, Recipe]) -> float:
        """The mean over tokens, with these units quantized and the others not."""
        with self._quantized(recipes):
            found = self._logs()
        return float((self._full.exp() * (self._full - found)).sum(-1).mean())

    def mixed(
        self, limit: Limit, progress: Progress = lambda done, of: None
    ) -> tuple[Recipe, float]:
        """The recipe that meets a limit, and its KL.

        Raises `OptionError` where none does.
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
        """Of all quantized matrices and their scales."""
        return sum(
            _bytes(layer, recipe.of_unit(unit))
            for unit, layers in self.units.items()
            for layer in layers.values()
        )

    def _within_bytes(self, order: list[Unit], most: int) -> tuple[Recipe, float]:
        """As many units as fit, those first that give back the most."""
        least = self.bytes_of(self.recipe)
        if least > most:
            raise OptionError(
                f"{self.recipe.name} alone takes {least} bytes of matrices; allow "
                "that, or choose fewer bits or larger blocks"
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
        """The fewest of the order that are enough, by bisection."""
        found = {}

        def enough(count: int) -> bool:
            recipe = self.recipe.raise_units(order[:count])
            found[count] = recipe, self._kl_of(recipe)
            return found[count][1] <= most

        if not enough(len(order)):
            raise OptionError(
                f"{self.recipe.name} with more bits for all has a KL of "
                f"{found[len(order)][1]:.2g}; allow that, or choose more bits or "
                "smaller blocks"
            )
        low, high = 0, len(order)
        while low < high:
            middle = (low + high) // 2
            if enough(middle):
                high = middle
            else:
                low = middle + 1
        return found[high]

    def _kl_of(self, recipe: Recipe) -> float:
        return self.kl({unit: recipe.of_unit(unit) for unit in self.units})

    def _more_bytes(self, unit: Unit) -> int:
        raised = self.recipe.raise_units([unit])
        return sum(
            _bytes(layer, raised.of_unit(unit))
            - _bytes(layer, self.recipe.of_unit(unit))
            for layer in self.units[unit].values()
        )

    def _of(self, name: str, layer: torch.nn.Linear, recipe: Recipe) -> Blocks:
        key = name, recipe
        if key not in self._blocks:
            matrix = layer.weight.detach().float().numpy().T
            tied = self._tied and name in self.units.get(HEAD, {})
            moments = self.moments.get(name)
            self._blocks[key] = quantize(matrix, recipe, moments, tied)
        return self._blocks[key]

    @contextmanager
    def _quantized(self, recipes: Mapping[Unit, Recipe]) -> Iterator[None]:
        """Let the weights be what their integers stand for."""
        kept = []
        try:
            for unit, recipe in recipes.items():
                for name, layer in self.units[unit].items():
                    if recipe.bits is None:
                        continue
                    blocks = self._of(name, layer, recipe)
                    kept.append((layer, layer.weight.data))
                    layer.weight.data = torch.from_numpy(blocks.floats.T).to(
                        self._dtype
                    )
            yield
        finally:
            # Backwards: two layers may share a weight.
            for layer, stored in reversed(kept):
                layer.weight.data = stored

    def _logs(self) -> torch.Tensor:
        """Log probabilities, float32 [windows, length, vocab]."""
        with torch.no_grad():
            rows = [self.model(ids[None], use_cache=False).logits for ids in self.ids]
        self._dtype = rows[0].dtype
        return torch.cat(rows).float().log_softmax(-1)


def _check_measurable(name: str, module: torch.nn.Module) -> None:
    """Matrices outside of linear layers are quantized, but no unit would have them."""
    weights = module.named_parameters(recurse=False)
    matrices = [each for each, weight in weights if weight.dim() > 1]
    if matrices and not isinstance(module, torch.nn.Embedding):
        raise OptionError(
            f"{name}.{matrices[0]} is no linear layer's, so how much its bits matter "
            "cannot be measured; leave the limit out"
        )


def _bytes(layer: torch.nn.Linear, recipe: Recipe) -> int:
    """Of a layer's integers, scales and zeros, or of its floats, in float32."""
    columns, rows = layer.weight.shape
    if recipe.bits is None:
        return columns * rows * torch.float32.itemsize
    blocks = -(-rows // recipe.block_size)
    integers = columns * blocks * recipe.block_size * recipe.bits // 8
    zeros = 0
    if recipe.algorithm not in SYMMETRIC:
        zeros = columns * -(-blocks * recipe.bits // 8)
    return integers + columns * blocks * torch.float32.itemsize + zeros
