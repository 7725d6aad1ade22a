"""Attention over whole sequences whose last rows carry all streams.

The rows of a layer with streams are the T rows of the sequence and then gamma streams
for each of the last C of them, carrier by carrier. A stream only looks at the sequence
and its own siblings, so scores cost C * gamma * (T + gamma) instead of the square of
all rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from jetdraft.checkpoints.attention import unknown_arguments
from jetdraft.checkpoints.streamed import GAMMA_OF, ROWS_OF
from jetdraft.errors import UnsupportedModelError

IMPLEMENTATION = "jetdraft-training"
"""The name under which the attention is registered with transformers."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention [b, heads, n, d] to [b, n, heads, d], with streams or without.

    `ROWS_OF` of the module is T in a layer with streams, and missing below them.
    """
    if sliding_window or softcap or unknown_arguments(extra):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends in windows, with capped scores or more; "
            "streams need plain attention"
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = float(scaling if scaling is not None else query.shape[-1] ** -0.5)
    rows = getattr(module, ROWS_OF, query.shape[2])
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, :rows],
            key[:, :, :rows],
            value[:, :, :rows],
            is_causal=True,
            scale=scale,
        )
    ]
    if rows < query.shape[2]:
        gamma = getattr(module, GAMMA_OF)
        parts.append(_of_streams(query * scale, key, value, rows, gamma))
    return torch.cat(parts, 2).transpose(1, 2), None


def _of_streams(
    query: Tensor, key: Tensor, value: Tensor, rows: int, gamma: int
) -> Tensor:
    """The attention of the streams [b, heads, C * gamma, d] over all rows."""
    mine, own_keys, own_values = (
        x[:, :, rows:].reshape(*x.shape[:2], -1, gamma, x.shape[3])
        for x in (query, key, value)
    )
    keys, values = key[:, :, :rows], value[:, :, :rows]
    past = torch.ones(rows, rows, dtype=torch.bool, device=query.device).tril()
    past = past[rows - mine.shape[2] :]
    below = torch.ones(gamma, gamma, dtype=torch.bool, device=query.device).tril()
    along = torch.einsum("bhtgd,bhmd->bhtgm", mine, keys)
    along = along.masked_fill(~past[:, None], -torch.inf)
    across = torch.einsum("bhtgd,bhtjd->bhtgj", mine, own_keys)
    across = across.masked_fill(~below, -torch.inf)
    weights = torch.cat([along, across], -1).float().softmax(-1).to(value.dtype)
    seen = torch.einsum("bhtgm,bhmd->bhtgd", weights[..., :rows], values)
    seen = seen + torch.einsum("bhtgj,bhtjd->bhtgd", weights[..., rows:], own_values)
    return seen.flatten(2, 3)


AttentionInterface.register(IMPLEMENTATION, attend)
