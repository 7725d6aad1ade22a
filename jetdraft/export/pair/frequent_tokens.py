"""The tokens that a target writes most often: what a cut LM head keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetdraft.quant.calibration import Windows, own_attention

TOKENS = 512
"""Tokens of the text after which the target is asked what else it expects, about."""


def frequent_tokens(
    model: Any, windows: Windows, count: int, known: int | None = None
) -> Tensor:
    """The `count` most frequent tokens of a text that are below `known`, ascending.

    The result is int64 [count]; `known` is the vocabulary's size by default.
    Tokens that are equally frequent, for example all that the text lacks, are in the
    order of the probability that the model gives them in the text.

        frequent_tokens(checkpoint.model, windows, 32768)
    """
    expected = _expected(model, windows)
    # Below 1, so that it decides only among equal counts.
    share = expected / (1 + expected.sum())
    score = torch.bincount(windows.tokens, minlength=len(share)) + share
    return score[:known].argsort(descending=True, stable=True)[:count].sort().values


def _expected(model: Any, windows: Windows) -> Tensor:
    """How often the model expects each token in the text, float64 [vocabulary]."""
    rows = windows.ids[: max(1, TOKENS // windows.scored)]
    expected = torch.zeros(model.get_output_embeddings().weight.shape[0]).double()
    with own_attention(model), torch.no_grad():
        for ids in rows:
            logits = model(
                ids[None], use_cache=False, logits_to_keep=windows.scored
            ).logits
            expected += logits[0].float().softmax(-1).sum(0)
    return expected
