"""Some rows of a batch: at places, moved to other places, or their logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def logits_at(model: Any, ids: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """A causal LM's logits [k, vocabulary] for what follows k places of a batch.

    `ids` int64 [b, T] are padded on the right; `rows` and `places` int64 [k] are the
    indexes in it. The LM head reads no other rows, since it is the dear part.

        logits_at(model, ids, torch.tensor([0, 0]), torch.tensor([3, 4]))
    """

    def choose(head: Any, args: tuple[Tensor]) -> Tensor:
        return args[0][rows, places]

    handle = model.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return logits


def at(rows: Tensor, places: Tensor) -> Tensor:
    """The rows [b, T, ...] at places int64 [b, ...].

    at(ids, torch.tensor([[0, 3]]))    # ids [1, T]: the first and the fourth
    """
    sequences = torch.arange(len(rows), device=rows.device)
    return rows[sequences.view(-1, *[1] * (places.ndim - 1)), places]


def shifted(rows: Tensor, places: int, fill: float = 0) -> Tensor:
    """Row t + `places` becomes row t; the last rows are filled: [b, T, ...].

    shifted(torch.tensor([[5, 6, 7]]), 1)    # [[6, 7, 0]]
    """
    moved = torch.full_like(rows, fill)
    moved[:, : max(0, rows.shape[1] - places)] = rows[:, places:]
    return moved
