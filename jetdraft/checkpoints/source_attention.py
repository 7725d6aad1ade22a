"""Attention of encoder-decoders: over the source, in the encoder, and in the decoder.

The encoder's graph writes the cross keys and values once, in buffers of a fixed size
whose unused slots a bias hides. A decoder has positions of `embed_positions`, or T5's
bias by distance; both count the rows of a pass as the whole text, which they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, EncoderDecoderCache

from jetdraft.checkpoints.attention import (
    PassThroughCache,
    StepState,
    active_state,
    attend,
    unknown_arguments,
)
from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft-source"
"""The name under which the attention is registered with transformers."""

Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Called with a layer's module, query [1, heads, n, d], key and value
[1, kv_heads, n, d]; returns the mixed values [1, n, heads, d]."""

KeysAndValues = list[tuple[Tensor, Tensor]]
"""The keys and values [1, heads, slots, head_dim] of each layer."""


@dataclass
class SourceState(StepState):
    """A pass with a source; `own` replaces the decoder's attention to its text."""

    source_bias: Tensor = field(default_factory=lambda: torch.zeros(1))
    own: Attention | None = None


class CrossCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers is untyped
    """A cache that stores no new rows, and returns keys and values of the source."""

    def __init__(self, cross: KeysAndValues) -> None:
        super().__init__(PassThroughCache(), _WrittenCache(cross))
        self.is_updated = dict.fromkeys(range(len(cross)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions are given explicitly, so no length is needed."""
        return 0


class _WrittenCache(Cache):  # type: ignore[misc]
    """Keys and values that the encoder's graph wrote."""

    def __init__(self, pairs: KeysAndValues) -> None:
        super().__init__(layers=[])
        self.layers = [SimpleNamespace(keys=key, values=value) for key, value in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of slots; for 0 transformers would compute keys again."""
        return int(self.layers[layer_idx].keys.shape[2])


def attend_to_source(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend in the encoder, to the source, or to the text; return [1, n, heads, d].

    T5's `position_bias` [1, heads, n, n] counts in the encoder only.
    """
    if getattr(module, "is_causal", False):
        own = getattr(active_state(), "own", None)
        if own is not None:
            return own(module, query, key, value), None
        return attend(module, query, key, value, attention_mask, scaling, **extra)
    unknown = unknown_arguments(extra)
    if attention_mask is not None or unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to a source with "
            f"{', '.join(unknown) or 'a mask of its own'}; see docs/models.md"
        )
    bias = position_bias
    if getattr(module, "is_decoder", False):
        state = active_state()
        assert isinstance(state, SourceState)
        bias = state.source_bias
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias
    weights = scores.float().softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2), None


def set_attention(model: Any, name: str) -> None:
    """Let all parts of a model attend as `name` says; T5's halves have own configs."""
    model.set_attn_implementation(name)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


AttentionInterface.register(IMPLEMENTATION, attend_to_source)


def relative_bias_module(model: Any) -> Any:
    """Return the decoder's attention with a table of biases by distance, or None."""
    modules = model.get_decoder().modules()
    named = "has_relative_attention_bias"
    return next((m for m in modules if getattr(m, named, False)), None)


def distance_bias(
    model: Any, rows: Tensor, slots: Tensor, both_ways: bool = False
) -> Tensor:
    """Return the bias [b, heads, n, k] of slots at positions [b, k] for rows [b, n].

    With `both_ways` a slot after a row counts like a slot as far before it.
    """
    module = relative_bias_module(model)
    distance = slots[:, None, :] - rows[:, :, None]
    buckets = module._relative_position_bucket(
        -distance.abs() if both_ways else distance,
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias: Tensor = module.relative_attention_bias(buckets)
    return bias.permute(0, 3, 1, 2)


@contextlib.contextmanager
def at_positions(model: Any, positions: Tensor) -> Iterator[None]:
    """Let the decoder use `positions` int64 [b, n], not 0, 1, ..., inside the block."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    if table is None:
        if relative_bias_module(model) is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has positions of its own kind; export another "
                "architecture"
            )
        yield
        return
    places = positions + getattr(table, "offset", 0)
    table.forward = lambda *_, **__: torch.nn.functional.embedding(places, table.weight)
    try:
        yield
    finally:
        del table.forward


@contextlib.contextmanager
def answering_rows(model: Any, rows: Any) -> Iterator[None]:
    """Let the LM head read states [b, n, h] at the index `rows` only, in the block."""

    def keep(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows]
        return output

    handle = model.get_decoder().register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()
