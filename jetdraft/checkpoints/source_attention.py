"""Attention of encoder-decoders: the decoder's own over the fixed KV buffers, plain
attention in the encoder, and over the source.

The decoder attends to what it wrote as every decoder here does, see `attention.attend`.
Its cross attention reads keys and values that the encoder's graph wrote once for each
source, in buffers of a fixed size whose unused slots a bias hides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, EncoderDecoderCache

from jetdraft.checkpoints.attention import (
    HandThrough,
    StepState,
    active_state,
    attend,
    unknown_arguments,
)
from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft-source"
"""The name under which the attention is registered with transformers."""

Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's module and query [1, heads, n, d], key and value [1, kv_heads, n, d]:
the mixed values [1, n, heads, d]."""

Pairs = list[tuple[Tensor, Tensor]]
"""Keys and values [1, heads, slots, head_dim] by layer."""


@dataclass
class SourceState(StepState):
    """A pass of a decoder that reads a source.

    `source_bias` [1, 1, 1, slots] hides the slots behind the source. `own` is how the
    decoder attends to its own text; None for `attend`.
    """

    source_bias: Tensor = field(default_factory=lambda: torch.zeros(1))
    own: Attention | None = None


class CrossCache(EncoderDecoderCache):  # type: ignore[misc]  # transformers is untyped
    """Hands new rows through, and gives the keys and values of the source."""

    def __init__(self, cross: Pairs) -> None:
        super().__init__(HandThrough(), _Written(cross))
        self.is_updated = dict.fromkeys(range(len(cross)), True)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are given explicitly, so the length never matters."""
        return 0


class _Written(Cache):  # type: ignore[misc]
    """Keys and values that the encoder's graph wrote."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(layers=[])
        self.layers = [_Layer(key, value) for key, value in pairs]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not 0, or transformers would compute them anew."""
        return int(self.layers[layer_idx].keys.shape[2])


@dataclass
class _Layer:
    keys: Tensor
    values: Tensor


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
    """Attention in all parts: [1, heads, n, d] to [1, n, heads, d].

    The `position_bias` [1, heads, n, n] that T5 gives counts in the encoder only: in
    the decoder it would count the rows of a pass as the whole text, so there the active
    state has the bias.
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


def implement(model: Any, name: str) -> None:
    """Let all parts of a model attend as `name` says.

    The two halves of T5 have configs of their own, which transformers leaves out.
    """
    model.set_attn_implementation(name)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


AttentionInterface.register(IMPLEMENTATION, attend_to_source)
