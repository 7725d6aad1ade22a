"""Texts that an encoder-decoder writes about sources, by plain sampling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from jetdraft.train.taught.continuation import GrowingTexts, chances_of, chosen


@torch.no_grad()
def source_continuations(
    model: Any,
    sources: Sequence[list[int]],
    counts: Sequence[int],
    ends: Collection[int],
    seeds: Sequence[int],
    start: Sequence[int],
) -> list[list[int]]:
    """Each source, and behind it at most its count of tokens, sampled at T = 1.

    A text begins with the tokens `start`, which are left out, and ends after one of the
    tokens `ends`. See `continuations`.

        source_continuations(model, [[5, 7]], [20], ends={0}, seeds=[1], start=[3])
    """
    longest, most = max(map(len, sources)), max(counts)
    ids = torch.zeros(len(sources), longest, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = torch.tensor(source)
        seen[row, : len(source)] = 1
    seen = seen.to(model.device)
    encoded = model.get_encoder()(ids.to(model.device), attention_mask=seen)
    latest = torch.tensor([list(start)] * len(sources), device=model.device)
    chances = torch.stack([chances_of(seed, most) for seed in seeds]).to(model.device)
    texts, cache = GrowingTexts(sources, counts, ends), None
    for number in range(most):
        outputs = model(
            encoder_outputs=encoded,
            attention_mask=seen,
            decoder_input_ids=latest,
            past_key_values=cache,
            use_cache=True,
        )
        cache = outputs.past_key_values
        latest = chosen(outputs.logits[:, -1], chances[:, number, None], None)
        if not texts.add(latest[:, 0].tolist()):
            break
    return texts.ids
