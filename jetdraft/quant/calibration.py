"""Measures the second moments of the inputs of a model's matrices over a text."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from jetdraft.errors import DataError
from jetdraft.files import read_text
from jetdraft.quant.blocks import Floats

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
        text = read_text(file)
        encoder = Tokenizer.from_str(tokenizer)
        tokens = encoder.encode(text, add_special_tokens=False).ids
        if len(tokens) < 2:
            fact = f"{file} has {len(tokens)} tokens"
            raise DataError(f"{fact}; give a text like those that the model will write")
        length = min(WINDOW, longest, len(tokens))
        count = len(tokens) // length
        ids = torch.tensor(tokens[: count * length]).reshape(count, length)
        chosen = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).long()
        return cls(ids[chosen], tokens=torch.tensor(tokens))


def second_moments(
    model: Any, windows: Windows, diagonal: bool = False
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
            sums[name] = sums[name] + moments if name in sums else moments
        owners[name] = owner

    def hook(name: str) -> Any:
        return lambda layer, inputs: add(name, inputs[0])

    with ExitStack() as hooks, own_attention(model), torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                watched = module.register_forward_pre_hook(hook(f"{name}.weight"))
                hooks.enter_context(watched)
        for ids in windows.ids:
            model(input_ids=ids[None], use_cache=False)
    return {name: sums[owner] for name, owner in owners.items()}


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Let a model attend by transformers' own eager code inside the block."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
