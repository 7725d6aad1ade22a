"""How far quantized matrices move a model from itself: KL divergence over a text.

Weights are what their integers stand for, inputs are rounded as the CPU's kernels read
them: the result is within a tenth of the bundle's (docs/log/quantization.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from jetdraft.errors import OptionError
from jetdraft.quant.algorithms import FEWEST, quantize
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows
from jetdraft.quant.grids import GridMatrix, Matrix
from jetdraft.recipe import GRIDS, HEAD, SYMMETRIC, Recipe, Unit, grid_for, unit_of

MAX_TOKENS = 512
"""The most tokens that are compared; their log probabilities stay in memory."""

BATCH_TOKENS = 256
"""About how many tokens a pass reads; each pass may convert all weights."""


class Divergence:
    """Measures how far recipes move a torch model over a text, and how large they are.

    `units` are its layers and its LM head. `moments` are the result of
    `second_moments`. With `rounds_inputs` the provider rounds the inputs of products.
    """

    def __init__(
        self,
        model: Any,
        windows: Windows,
        moments: Mapping[str, Floats],
        rounds_inputs: bool = True,
    ) -> None:
        self.model, self.rounds_inputs = model, rounds_inputs
        self.moments = moments
        length = min(MAX_TOKENS, windows.ids.shape[1])
        ids = windows.ids[: MAX_TOKENS // min(windows.scored, length), :length]
        self.batches = torch.split(ids, max(1, BATCH_TOKENS // length))
        self.scored = min(windows.scored, length)
        self.units: dict[Unit, dict[str, torch.nn.Linear]] = {}
        head = model.get_output_embeddings()
        for name, layer in model.named_modules():
            if not isinstance(layer, torch.nn.Linear):
                _check_measurable(name, layer)
            elif min(layer.weight.shape) >= FEWEST:
                unit = HEAD if layer is head else unit_of(name)
                self.units.setdefault(unit, {})[f"{name}.weight"] = layer
        # An embedding may share the head's matrix, and its integers.
        self._modules_of_weight: dict[int, list[Any]] = {}
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                self._modules_of_weight.setdefault(id(module.weight), []).append(module)
        self._blocks: dict[tuple[str, Recipe], Matrix] = {}
        self.dtype = torch.float32
        self._logprobs = [self._log_probabilities(ids) for ids in self.batches]

    def mean_kl(self, recipe: Recipe) -> float:
        """Return the mean KL of a whole recipe, in nats per token."""
        return self.kl_of_units({unit: recipe.of_unit(unit) for unit in self.units})

    def kl_of_units(
        self, recipes: Mapping[Unit, Recipe], batches: int | None = None
    ) -> float:
        """Return mean KL with only these units quantized, on the first `batches`."""
        total, rows = 0.0, 0
        with self._quantizing(recipes):
            for full, ids in zip(self._logprobs[:batches], self.batches, strict=False):
                logs = self._log_probabilities(ids)
                total += float((full.exp() * (full - logs)).sum())
                rows += len(full)
        return total / rows

    def overlap(
        self, recipe: Recipe, other: Divergence, ids: torch.Tensor | None = None
    ) -> float:
        """Return the mean of sum(min(p, q)), with this model's q and another model's p.

        It is the share of drafted tokens that a target accepts (Leviathan et al.,
        2211.17192, corollary 3.6). `ids` int64 [n] are the tokens of this model's
        logits, None for all.
        """
        total, rows = 0.0, 0
        with self._quantizing({unit: recipe.of_unit(unit) for unit in self.units}):
            for whole, batch in zip(other._logprobs, self.batches, strict=True):
                own = self._log_probabilities(batch)
                full = whole if ids is None else whole[:, ids]
                size = min(full.shape[1], own.shape[1])  # vocabularies may be padded
                total += float(torch.minimum(full[:, :size], own[:, :size]).exp().sum())
                rows += len(full)
        return total / rows

    def bytes_of(self, recipe: Recipe) -> int:
        """Return the bytes of all matrices by a recipe, with scales and zeros."""
        return sum(self.bytes_of_unit(u, recipe.of_unit(u)) for u in self.units)

    def bytes_of_unit(self, unit: Unit, recipe: Recipe) -> int:
        """Return the bytes of the matrices of one unit, with scales and zeros."""
        return sum(_matrix_bytes(layer, recipe) for layer in self.units[unit].values())

    def drop_blocks(self) -> None:
        """Free the quantized weights that are cached for recipes measured so far."""
        self._blocks.clear()

    def rounded(self, recipe: Recipe) -> dict[str, GridMatrix]:
        """Return the matrices that a recipe rounded to types of llama.cpp, by name."""
        matrices = {
            name: self._blocks.get((name, recipe.of_unit(unit)))
            for unit, layers in self.units.items()
            for name in layers
        }
        return {n: m for n, m in matrices.items() if isinstance(m, GridMatrix)}

    def _blocks_of(self, name: str, layer: torch.nn.Linear, recipe: Recipe) -> Matrix:
        """Return a weight quantized by a recipe; it is computed once and cached."""
        key = name, recipe
        if key not in self._blocks:
            matrix = layer.weight.detach().float().numpy().T
            self._blocks[key] = quantize(matrix, recipe, self.moments.get(name))
        return self._blocks[key]

    @contextmanager
    def _quantizing(self, recipes: Mapping[Unit, Recipe]) -> Iterator[None]:
        """Quantize these units, and round their inputs, inside the block."""
        with ExitStack() as hooks:
            for unit, recipe in recipes.items():
                for name, layer in self.units[unit].items():
                    if recipe.bits is None:
                        continue
                    blocks = self._blocks_of(name, layer, recipe)
                    for module in self._modules_of_weight[id(layer.weight)]:
                        rounds = self.rounds_inputs and module is layer
                        rounding = _rounding(module, blocks, self.dtype, rounds)
                        hooks.enter_context(rounding)
            yield

    def _log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities at the compared tokens, float32 [n, vocab]."""
        with torch.no_grad():
            answer = self.model(ids, use_cache=False, logits_to_keep=self.scored)
        self.dtype = answer.logits.dtype
        logs: torch.Tensor = answer.logits.flatten(0, 1).float().log_softmax(-1)
        return logs


@contextmanager
def _rounding(
    module: torch.nn.Module, blocks: Matrix, dtype: torch.dtype, inputs: bool
) -> Iterator[None]:
    """Let a module run with quantized weights, as floats of `dtype`, inside the block.

    With `inputs` its inputs are rounded too. Floats exist only while the module runs.
    """
    original = module.weight.data

    def before(module: Any, read: tuple[torch.Tensor, ...]) -> Any:
        module.weight.data = torch.from_numpy(blocks.floats.T).to(dtype)
        if not inputs:
            return None
        first, *others = read
        return (round_to_int8(first, blocks.block_size).to(first.dtype), *others)

    def after(module: Any, read: Any, output: Any) -> None:
        module.weight.data = original

    # First, since a model may convert its weights to compute.
    hooks = (
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def round_to_int8(values: torch.Tensor, size: int) -> torch.Tensor:
    """Round values [..., n] to int8 with a scale per block of `size`; return float32.

    MatMulNBits of onnxruntime's CPU provider reads its inputs so at accuracy level 4,
    except for two bits in blocks of 16, and so does `jetdraft.native`.
    """
    count = values.shape[-1]
    whole = torch.nn.functional.pad(values.float(), (0, -count % size))
    blocks = whole.reshape(*whole.shape[:-1], -1, size)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
    floats: torch.Tensor = (integers * scales).reshape(whole.shape)[..., :count]
    return floats


def _check_measurable(name: str, module: torch.nn.Module) -> None:
    """Raise `OptionError` for matrices outside of linear layers: no unit has them."""
    weights = module.named_parameters(recurse=False)
    matrices = [weight_name for weight_name, weight in weights if weight.dim() > 1]
    if matrices and not isinstance(module, torch.nn.Embedding):
        raise OptionError(
            f"{name}.{matrices[0]} is not in a linear layer, so its sensitivity "
            "cannot be measured; leave the limit out"
        )


def _matrix_bytes(layer: torch.nn.Linear, recipe: Recipe) -> int:
    """Return the bytes of a layer's integers, scales and zeros, or its floats."""
    columns, rows = layer.weight.shape
    if recipe.bits is None:
        return columns * rows * torch.float32.itemsize
    if recipe.scheme in GRIDS:
        grid = grid_for(recipe.scheme, rows)
        size = 256 if grid.endswith("k") else 32
        whole = -(-columns // 16) * 16 * -(-rows // size) * size
        return int(whole * GRIDS[grid] / 8)
    size = recipe.block_size
    blocks = -(-rows // size)
    integers = columns * blocks * size * recipe.bits // 8
    zeros = 0
    if recipe.algorithm not in SYMMETRIC:
        zeros = columns * -(-blocks * recipe.bits // 8)
    return integers + columns * blocks * torch.float32.itemsize + zeros
