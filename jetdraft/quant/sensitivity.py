"""Mixed precision: finds the layers that need twice the bits.

The units are a model's decoder layers and its head. Each unit is quantized alone; the
KL divergence from the unquantized model is its sensitivity. The units with the most KL
per further byte get twice the bits, until all units together meet a limit. Everything
is computed in floats; int8 activations add to the KL.
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
"""The most tokens of the text that are compared; their logits stay in memory."""


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
        self._full_logs = self._log_probabilities()

    def kl(self, recipes: Mapping[Unit, Recipe]) -> float:
        """The mean KL in nats per token when only these units are quantized."""
        full = self._full_logs
        with self._quantized(recipes):
            logs = self._log_probabilities()
        return float((full.exp() * (full - logs)).sum(-1).mean())

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
        candidates = [unit for unit in self.units if unit and self._more_bytes(unit)]
        kl_per_byte = {}
        for done, unit in enumerate(candidates, start=1):
            kl = self.kl({unit: self.recipe.of_unit(unit)})
            kl_per_byte[unit] = kl / self._more_bytes(unit)
            progress(done, len(candidates))
        order = sorted(candidates, key=lambda unit: kl_per_byte[unit], reverse=True)
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
        size = self.bytes_of(self.recipe)
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

    def _kl_of(self, recipe: Recipe) -> float:
        """The mean KL of a whole recipe."""
        return self.kl({unit: recipe.of_unit(unit) for unit in self.units})

    def _more_bytes(self, unit: Unit) -> int:
        """How many bytes a unit takes more with twice the bits."""
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
            # Backwards, since two layers may share a weight.
            for layer, original in reversed(originals):
                layer.weight.data = original

    def _log_probabilities(self) -> torch.Tensor:
        """The model's log probabilities, float32 [windows, length, vocab]."""
        with torch.no_grad():
            rows = [self.model(ids[None], use_cache=False).logits for ids in self.ids]
        self._dtype = rows[0].dtype
        return torch.cat(rows).float().log_softmax(-1)


def _check_measurable(name: str, module: torch.nn.Module) -> None:
    """Refuse matrices outside of linear layers, since no unit contains them."""
    weights = module.named_parameters(recurse=False)
    matrices = [weight_name for weight_name, weight in weights if weight.dim() > 1]
    if matrices and not isinstance(module, torch.nn.Embedding):
        raise OptionError(
            f"{name}.{matrices[0]} is not in a linear layer, so its sensitivity "
            "cannot be measured; leave the limit out"
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
