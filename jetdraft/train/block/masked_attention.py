"""Attention of a whole batch of texts and blocks about sources, for trainings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "jetdraft-masked"
"""The name under which the attention is registered with transformers."""


@dataclass(frozen=True)
class Masks:
    """What is added to scores: `source` [b, 1, 1, s] over a source, in encoder and
    decoder, and `own` [b, 1 or heads, m, m] over the decoder's own rows."""

    source: Tensor
    own: Tensor | None = None


_active: list[Masks] = []


@contextmanager
def masking(masks: Masks) -> Iterator[None]:
    """Let attention layers add these masks while the block runs."""
    _active.append(masks)
    try:
        yield
    finally:
        _active.pop()


def attend_masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention in all parts: [b, heads, n, d] to [b, n, heads, d].

    The `position_bias` that T5 gives counts in the encoder only: in the decoder it
    would count the rows of blocks as text, so there the masks have the bias.
    """
    masks = _active[-1]
    bias = masks.source
    if getattr(module, "is_causal", False):
        assert masks.own is not None
        bias = masks.own
    elif position_bias is not None and not getattr(module, "is_decoder", False):
        bias = bias + position_bias
    mixed = F.scaled_dot_product_attention(
        query, key, value, bias.to(query.dtype), scale=scaling
    )
    return mixed.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, attend_masked)
