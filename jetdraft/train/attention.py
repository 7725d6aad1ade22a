"""The attention of trainings: whole sequences, with streams or under masks.

The rows of a layer are the T rows of a sequence, then gamma streams for each of its C
carriers. A stream attends to the sequence and to its carrier's streams only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from jetdraft.checkpoints.attention import set_attention, unknown_arguments
from jetdraft.checkpoints.streams import LAYOUT_ATTRIBUTE, Layout
from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft-training"  # Its name in transformers.
_MASKED_BY = "masked_by_training"  # Has the `Masked` of a module's model.


@dataclass(frozen=True)
class Masks:
    """What is added to attention scores, 0 or a large negative number.

    `source` [b, 1, 1, s] is over a source, in encoder and decoder, and `own` [b, 1 or
    heads, m, m] over the decoder's own rows.
    """

    source: Tensor
    own: Tensor | None = None


class Masked:
    """Makes all attention of an encoder-decoder add the masks that `adding` sets."""

    def __init__(self, model: Any) -> None:
        self.masks: Masks | None = None
        for module in model.modules():
            object.__setattr__(module, _MASKED_BY, self)
        set_attention(model, IMPLEMENTATION)

    @contextmanager
    def adding(self, masks: Masks) -> Iterator[None]:
        """Add these masks to the scores of the passes in the block."""
        before, self.masks = self.masks, masks
        try:
            yield
        finally:
            self.masks = before

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        position_bias: Tensor | None,
    ) -> Tensor:
        """Return a module's attention under the masks, mixed values [b, n, heads, d].

        T5's bias counts in the encoder only: `masks.own` has the decoder's.
        """
        assert self.masks is not None
        bias = self.masks.source
        if getattr(module, "is_causal", False):
            assert self.masks.own is not None
            bias = self.masks.own
        elif position_bias is not None and not getattr(module, "is_decoder", False):
            bias = bias + position_bias
        return F.scaled_dot_product_attention(
            query, key, value, bias.to(query.dtype), scale=scale
        ).transpose(1, 2)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks for it: [b, heads, n, d] to [b, n, heads, d]."""
    masked: Masked | None = getattr(module, _MASKED_BY, None)
    if masked is not None:
        return masked.attend(module, query, key, value, scaling, position_bias), None
    if sliding_window or softcap or unknown_arguments(extra):
        fact = "has windows, capped scores or other arguments"
        fix = "streams need plain attention, so choose another model"
        raise UnsupportedModelError.of(module, fact, fix)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    layout: Layout | None = getattr(module, LAYOUT_ATTRIBUTE, None)
    rows = query.shape[2] if layout is None else layout.rows
    q, k, v = (x[:, :, :rows] for x in (query, key, value))
    parts = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)]
    if layout is not None and rows < query.shape[2]:
        parts.append(_mix_streams(query * scale, key, value, layout))
    return torch.cat(parts, 2).transpose(1, 2), None


def _mix_streams(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Return the streams' mixed values [b, heads, C * gamma, d]; `query` is scaled."""
    rows, gamma = layout.rows, layout.gamma
    parts = (x[:, :, rows:] for x in (query, key, value))
    of_streams = (x.reshape(*x.shape[:2], -1, gamma, x.shape[3]) for x in parts)
    queries, stream_keys, stream_values = of_streams
    keys, values = key[:, :, :rows], value[:, :, :rows]
    carriers = layout.probe_rows[..., ::gamma]
    past = torch.arange(rows, device=query.device) <= carriers[..., None]
    past = past.view(-1, 1, carriers.shape[-1], 1, rows)
    below = torch.ones(gamma, gamma, dtype=torch.bool, device=query.device).tril()
    row_scores = torch.einsum("bhtgd,bhmd->bhtgm", queries, keys)
    row_scores = row_scores.masked_fill(~past, -torch.inf)
    stream_scores = torch.einsum("bhtgd,bhtjd->bhtgj", queries, stream_keys)
    stream_scores = stream_scores.masked_fill(~below, -torch.inf)
    scores = torch.cat([row_scores, stream_scores], -1)
    weights = scores.float().softmax(-1).to(value.dtype)
    row_weights, stream_weights = weights[..., :rows], weights[..., rows:]
    output = torch.einsum("bhtgm,bhmd->bhtgd", row_weights, values)
    output = output + torch.einsum("bhtgj,bhtjd->bhtgd", stream_weights, stream_values)
    return output.flatten(2, 3)


AttentionInterface.register(IMPLEMENTATION, attend)
