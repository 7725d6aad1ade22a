"""What the matrices of a model are fed: second moments of their inputs over a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from jetdraft.errors import DataError
from jetdraft.quant.blocks import Floats
from jetdraft.texts import read_text

WINDOW = 256
"""Tokens of a piece of text that is run at once."""

MOST_WINDOWS = 32


class Windows:
    """A text as token ids, int64 [windows, length].

    Raises `DataError` where it is unreadable, empty, or no token.

        Windows.of(Path("notes.txt"), tokenizer).ids
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    @classmethod
    def of(cls, file: Path, tokenizer: str | None, longest: int = WINDOW) -> Windows:
        """Equal pieces from all over a file, none with more tokens than `longest`."""
        if tokenizer is None:
            raise DataError(
                "the checkpoint has no tokenizer, so no text can calibrate it; choose "
                "an algorithm that needs none, as rtn"
            )
        text = read_text(file)
        found = Tokenizer.from_str(tokenizer).encode(text, add_special_tokens=False).ids
        if len(found) < 2:
            raise DataError(
                f"{file} has {len(found)} tokens; give a text like those that the "
                "model will write"
            )
        length = min(WINDOW, longest, len(found))
        count = len(found) // length
        ids = torch.tensor(found[: count * length]).reshape(count, length)
        chosen = torch.linspace(0, count - 1, min(count, MOST_WINDOWS)).long()
        return cls(ids[chosen])


def second_moments(model: Any, windows: Windows) -> dict[str, Floats]:
    """The sums of x x^T over the inputs x of every linear layer, by weight name.

    float32 [inputs, inputs]. `model` runs with an attention of its own, not ours.
    """
    sums = _Sums()
    with own_attention(model), sums.watching(model), torch.no_grad():
        for ids in windows.ids:
            model(input_ids=ids[None], use_cache=False)
    return {name: sums.of[owner] for name, owner in sums.owners.items()}


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Let a model attend without our buffers for a while."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


class _Sums:
    """One sum for all layers that are given the same tensor, as q, k and v are."""

    def __init__(self) -> None:
        self.of: dict[str, Floats] = {}
        self.owners: dict[str, str] = {}
        self._last: torch.Tensor | None = None
        self._owner = ""

    def add(self, name: str, inputs: torch.Tensor) -> None:
        """Count the inputs of a layer."""
        if inputs is not self._last:
            self._last, self._owner = inputs, name
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            found = (rows.T @ rows).numpy()
            self.of[name] = self.of[name] + found if name in self.of else found
        self.owners[name] = self._owner

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Add whatever linear layers are given."""

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
