"""What a text says of a quantization: the moments of matrices' inputs, and how far
quantized matrices move a model from itself, as KL divergence.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from jetdraft.errors import DataError, OptionError
from jetdraft.files import read_text
from jetdraft.quant.algorithms import FEWEST, quantize
from jetdraft.quant.blocks import Floats
from jetdraft.quant.grids import GridMatrix, Matrix
from jetdraft.quant.stored import StoredTensor
from jetdraft.recipe import GRIDS, HEAD, SYMMETRIC, Recipe, Unit, grid_for, unit_of

MAX_TOKENS = 512  # The log probabilities of compared tokens stay in memory.
BATCH_TOKENS = 256  # Tokens of a pass, about; each may convert all weights.

WINDOW = 256  # The most tokens of a window, which a model reads in one pass.
MAX_WINDOWS = 32  # The most windows that are taken of a text.


class Windows:
    """Token ids int64 [windows, length]; KL is of the last `scored` of each window."""

    def __init__(
        self, ids: Tensor, scored: int | None = None, tokens: Tensor | None = None
    ) -> None:
        self.ids = ids
        self.scored = scored or ids.shape[1]
        self.tokens = ids[:, -self.scored :].flatten() if tokens is None else tokens

    @classmethod
    def of(cls, file: Path, tokenizer: str | None, longest: int = WINDOW) -> "Windows":
        """Read equal windows of at most `longest` tokens, spread evenly over a file.

        `tokenizer` is the JSON of a tokenizers.Tokenizer. Raises `DataError`.
        """
        if tokenizer is None:
            raise DataError(
                "the checkpoint has no tokenizer to read the calibration text; choose "
                "an algorithm that needs no text, for example rtn"
            )
        encoder = Tokenizer.from_str(tokenizer)
        tokens = encoder.encode(read_text(file), add_special_tokens=False).ids
        if len(tokens) < 2:
            fact = f"{file} has {len(tokens)} tokens"
            raise DataError(f"{fact}; give a text like those that the model will write")
        length = min(WINDOW, longest, len(tokens))
        count = len(tokens) // length
        ids = torch.tensor(tokens[: count * length]).reshape(count, length)
        chosen = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).long()
        return cls(ids[chosen], tokens=torch.tensor(tokens))


def second_moments(
    model: Any,
    windows: Windows,
    diagonal: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Floats]:
    """Sum x x^T by weight name: float32 [rows, rows], or [rows] of the `diagonal`."""
    sums: dict[str, Floats] = {}
    # Layers that read the same tensor, for example q, k and v, share one sum.
    owners: dict[str, str] = {}
    last, owner = torch.empty(0), ""

    def add(name: str, inputs: Tensor) -> None:
        nonlocal last, owner
        if inputs is not last:
            last, owner = inputs, name
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            moments = (rows.square().sum(0) if diagonal else rows.T @ rows).numpy()
            if name in sums:
                sums[name] += moments  # in place: they are large
            else:
                sums[name] = moments
        owners[name] = owner

    def hook(name: str) -> Any:
        return lambda layer, inputs: add(name, inputs[0])

    with ExitStack() as hooks, own_attention(model), torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                watched = module.register_forward_pre_hook(hook(f"{name}.weight"))
                hooks.enter_context(watched)
        for done, ids in enumerate(windows.ids, start=1):
            model(input_ids=ids[None], use_cache=False)
            progress(done, len(windows.ids))
    return {name: sums[owner] for name, owner in owners.items()}


@contextmanager
def own_attention(
    model: Any,
    use: Callable[[Any, str], None] = lambda m, name: m.set_attn_implementation(name),
) -> Iterator[None]:
    """In the block, let a model attend by transformers' eager code; `use` sets how."""
    implementation = model.config._attn_implementation
    use(model, "eager")
    try:
        yield
    finally:
        use(model, implementation)


class Divergence:
    """Measures how far recipes move a torch model over a text, and how large they are.

    `units` are layers and LM head, `moments` are from `second_moments`.
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
        self.units: dict[Unit, dict[str, _Matrix]] = {}
        head = model.get_output_embeddings()
        for name, layer in model.named_modules():
            unit = HEAD if layer is head else unit_of(name)
            for weight in _matrix_names(name, layer):
                matrix = _Matrix(layer, weight)
                self.units.setdefault(unit, {})[f"{name}.{weight}"] = matrix
        # An embedding may share the head's matrix, and its integers.
        self._embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
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
        self, recipe: Recipe, other: "Divergence", ids: torch.Tensor | None = None
    ) -> float:
        """Return the mean of sum(min(p, q)), with this model's q and another model's p.

        It is a target's acceptance rate (Leviathan et al., 2211.17192, corollary 3.6).
        `ids` int64 [n] are the tokens of this model's logits, None for all.
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
        return sum(_matrix_bytes(each, recipe) for each in self.units[unit].values())

    def drop_blocks(self) -> None:
        self._blocks.clear()

    def rounded(self, recipe: Recipe) -> dict[str, GridMatrix]:
        """Return the matrices that a recipe rounded to types of llama.cpp, by name."""
        keys = [(n, recipe.of_unit(u)) for u, own in self.units.items() for n in own]
        matrices = {key[0]: self._blocks.get(key) for key in keys}
        return {n: m for n, m in matrices.items() if isinstance(m, GridMatrix)}

    def _blocks_of(self, name: str, weight: "_Matrix", recipe: Recipe) -> Matrix:
        """Return a weight quantized by a recipe; it is computed once and cached."""
        key = name, recipe
        if key not in self._blocks:
            moments = self.moments.get(name)
            floats = (columns.detach().float().numpy() for columns in weight.matrices())
            parts: list[Any] = [quantize(x.T, recipe, moments) for x in floats]
            self._blocks[key] = _joined(parts) if parts[1:] else parts[0]
        return self._blocks[key]

    @contextmanager
    def _quantizing(self, recipes: Mapping[Unit, Recipe]) -> Iterator[None]:
        """Quantize these units, and round their inputs, inside the block."""
        with ExitStack() as hooks:
            for unit, recipe in recipes.items():
                for name, weight in self.units[unit].items():
                    if recipe.bits is None:
                        continue
                    blocks = self._blocks_of(name, weight, recipe)
                    rounding = _rounding(weight, blocks, self.dtype, self.rounds_inputs)
                    hooks.enter_context(rounding)
                    for module in self._embeddings:
                        if module.weight is getattr(weight.module, weight.name):
                            tied = _rounding(_Matrix(module), blocks, self.dtype, False)
                            hooks.enter_context(tied)
            yield

    def _log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities at the compared tokens, float32 [n, vocab]."""
        with torch.no_grad():
            answer = self.model(ids, use_cache=False, logits_to_keep=self.scored)
        self.dtype = answer.logits.dtype
        logs: torch.Tensor = answer.logits.flatten(0, 1).float().log_softmax(-1)
        return logs


class _Matrix(NamedTuple):
    """A matrix of a linear layer, or a stack of matrices of experts."""

    module: Any
    name: str = "weight"

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [columns, rows], or the stack [experts, columns, rows]."""
        weight: torch.Tensor = getattr(self.module, self.name)
        return weight.transpose(1, 2) if self._is_turned else weight

    @property
    def _is_turned(self) -> bool:
        is_stack = getattr(self.module, self.name).dim() == 3
        return is_stack and bool(self.module.is_transposed)

    def matrices(self) -> Iterator[torch.Tensor]:
        """Yield the matrix, or the matrices of a stack, [columns, rows]."""
        weight = self.weight
        if weight.dim() == 2:
            yield weight
        else:
            yield from (weight[expert] for expert in range(len(weight)))

    def floats(self, blocks: Matrix, dtype: torch.dtype) -> torch.Tensor:
        """The integers as floats in the module's shape; a stack computes them late."""
        *count, columns, _ = shape = self.weight.shape
        if not count:
            return torch.from_numpy(blocks.floats.T).to(dtype)

        def read(index: int | None) -> torch.Tensor:
            if index is None:
                return torch.stack([read(expert) for expert in range(shape[0])])
            own = np.arange(index * columns, (index + 1) * columns)
            return torch.from_numpy(blocks.select_columns(own).floats.T).to(dtype)

        stack = StoredTensor(shape, dtype, read)
        return stack.transpose(1, 2) if self._is_turned else stack


def _joined(parts: list[GridMatrix]) -> GridMatrix:
    """The experts of a layer as one matrix, mapped from a file without a name."""
    with tempfile.TemporaryFile() as file:
        for part in parts:
            file.write(np.ascontiguousarray(part.data).data)
        file.flush()
        shape = sum(len(part.data) for part in parts), parts[0].data.shape[1]
        return replace(parts[0], data=np.memmap(file, np.uint8, "r", shape=shape))


@contextmanager
def _rounding(
    weight: _Matrix, blocks: Matrix, dtype: torch.dtype, inputs: bool
) -> Iterator[None]:
    """Let a module run with rounded weights, and inputs from outside, in the block."""
    original, rows = getattr(weight.module, weight.name), weight.weight.shape[-1]

    def before(module: Any, read: tuple[torch.Tensor, ...]) -> Any:
        floats = nn.Parameter(weight.floats(blocks, dtype), requires_grad=False)
        setattr(module, weight.name, floats)
        first, *others = read
        if not inputs or first.shape[-1] != rows:
            return None
        return (round_to_int8(first, blocks.block_size).to(first.dtype), *others)

    def after(module: Any, read: Any, output: Any) -> None:
        setattr(module, weight.name, original)

    # First, since a model may convert its weights to compute.
    first = weight.module.register_forward_pre_hook(before, prepend=True)
    with first, weight.module.register_forward_hook(after, always_call=True):
        yield


def round_to_int8(values: torch.Tensor, size: int) -> torch.Tensor:
    """Round [..., n] to int8 with a scale per block of `size`; return float32.

    The CPU's MatMulNBits reads its inputs so, except for two bits in blocks of 16.
    """
    count = values.shape[-1]
    whole = torch.nn.functional.pad(values.float(), (0, -count % size))
    blocks = whole.reshape(*whole.shape[:-1], -1, size)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
    floats: torch.Tensor = (integers * scales).reshape(whole.shape)[..., :count]
    return floats


def _matrix_names(name: str, module: nn.Module) -> list[str]:
    """The names of a module's quantized matrices; `OptionError` outside of units."""
    weights = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.Linear):
        return ["weight"] if min(module.weight.shape) >= FEWEST else []
    experts = getattr(module, "num_experts", None)
    matrices = [n for n, w in weights.items() if w.dim() > 1]
    if experts and all(weights[n].shape[0] == experts for n in matrices):
        return [n for n in matrices if weights[n].dim() == 3]
    if matrices and not isinstance(module, nn.Embedding):
        raise OptionError(
            f"{name}.{matrices[0]} is not in a linear layer, so its sensitivity "
            "cannot be measured; leave the limit out"
        )
    return []


def _matrix_bytes(weight: _Matrix, recipe: Recipe) -> int:
    *count, columns, rows = weight.weight.shape
    columns *= math.prod(count)
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
