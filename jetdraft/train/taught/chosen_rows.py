"""Logits of some rows of a batch: an LM head over all rows is the dear part."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def logits_at(model: Any, ids: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """A causal LM's logits [k, vocabulary] for what follows k places of a batch.

    `ids` int64 [b, T] are padded on the right; `rows` and `places` int64 [k] are the
    indexes in it. The LM head reads no other rows.

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
