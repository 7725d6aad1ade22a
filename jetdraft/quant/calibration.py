"""Measures the second moments of the inputs of a model's matrices over a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from jetdraft.errors import DataError
from jetdraft.files import read_text
from jetdraft.quant.blocks import Floats

WINDOW = 256
"""Tokens that the model reads in one pass."""

MOST_WINDOWS = 32
"""The most windows of a text that are read."""


class Windows:
    """A text as token ids, int64 [windows, length].

    A model is compared with itself on the last `scored` tokens of each window.
    `tokens` int64 [n] are all tokens whose frequency counts: those, or a whole file.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        scored: int | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        self.ids = ids
        self.scored = scored or ids.shape[1]
        self.tokens = ids[:, -self.scored :].flatten() if tokens is None else tokens

    @classmethod
    def of(cls, file: Path, tokenizer: str | None, longest: int = WINDOW) -> Windows:
        """Windows of equal length, at most `longest` tokens, spread evenly over a file.

        `tokenizer` is the JSON of a tokenizers.Tokenizer. Raises `DataError` if it is
        None, or if the file cannot be read or has fewer than two tokens.
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
            raise DataError(
                f"{file} has {len(tokens)} tokens; give a text like those that the "
                "model will write"
            )
        length = min(WINDOW, longest, len(tokens))
        count = len(tokens) // length
        ids = torch.tensor(tokens[: count * length]).reshape(count, length)
        chosen = torch.linspace(0, count - 1, min(count, MOST_WINDOWS)).long()
        return cls(ids[chosen], tokens=torch.tensor(tokens))


def second_moments(model: Any, windows: Windows) -> dict[str, Floats]:
    """The sums of x x^T over the inputs x of each linear layer, by weight name.

    Each is float32 [inputs, inputs]. The model runs with transformers' own attention.
    """
    sums = _Sums()
    with own_attention(model), sums.watching(model), torch.no_grad():
        for ids in windows.ids:
            model(input_ids=ids[None], use_cache=False)
    return {name: sums.of[owner] for name, owner in sums.owners.items()}


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Let a model use transformers' own attention inside the block."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)


class _Sums:
    """The sums of second moments, by weight name.

    Layers that read the same tensor, for example q, k and v, share one sum: `owners`
    maps each weight to the weight whose sum it shares.
    """

    def __init__(self) -> None:
        self.of: dict[str, Floats] = {}
        self.owners: dict[str, str] = {}
        self._last: torch.Tensor | None = None
        self._owner = ""

    def add(self, name: str, inputs: torch.Tensor) -> None:
        """Add the inputs [..., inputs] of a layer; layers may share them."""
        if inputs is not self._last:
            self._last, self._owner = inputs, name
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            moments = (rows.T @ rows).numpy()
            self.of[name] = self.of[name] + moments if name in self.of else moments
        self.owners[name] = self._owner

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Add the inputs of all linear layers that run inside the block."""

        def hook(name: str) -> Any:
            return lambda layer, inputs: self.add(name, inputs[0])

        handles = [
            layer.register_forward_pre_hook(hook(f"{name}.weight"))
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
