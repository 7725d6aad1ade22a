"""Texts that a model goes on with, by plain sampling."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continuations(
    model: Any,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    ends: Collection[int],
    seeds: Sequence[int],
    ids: Tensor | None = None,
) -> list[list[int]]:
    """Each prompt with at most as many tokens more as its count, sampled at T = 1.

    A text ends after one of the tokens `ends`. Nothing but the model decides: neither
    a filter nor a penalty of its checkpoint. The rest of a text depends on the model,
    the prompt and its own seed alone, not on the other prompts. `ids` int64 [n] are the
    tokens that can be chosen, by default all.

        continuations(model, [[5, 7]], [20], ends={0}, seeds=[1])
    """
    longest, most = max(map(len, prompts)), max(counts)
    latest, seen = _padded(prompts, longest, model.device)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    chances = torch.stack([chances_of(seed, most) for seed in seeds]).to(latest.device)
    texts, cache = GrowingTexts(prompts, counts, ends), None
    for number in range(most):
        outputs = model(
            input_ids=latest,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = outputs.past_key_values
        latest = chosen(outputs.logits[:, -1], chances[:, number, None], ids)
        if not texts.add(latest[:, 0].tolist()):
            break
        seen = torch.cat([seen, torch.ones_like(latest)], dim=1)
        # A text that has ended may lie at the end of the model's positions.
        grows = torch.tensor(texts.grows)[:, None].to(seen)
        positions = positions[:, -1:] + grows
    return texts.ids


class GrowingTexts:
    """Texts that begin as prompts, and which of them still grow.

    texts = GrowingTexts([[5, 7]], counts=[20], ends={0})
    texts.add([9])    # True, and texts.ids is [[5, 7, 9]]
    """

    def __init__(
        self, prompts: Sequence[list[int]], counts: Sequence[int], ends: Collection[int]
    ) -> None:
        self.ids = [list(prompt) for prompt in prompts]
        self.grows = [count > 0 for count in counts]
        self._left, self._ends = list(counts), ends

    def add(self, tokens: Sequence[int]) -> bool:
        """Add a token to each text that grows; gives whether any text grows on."""
        for row, token in enumerate(tokens):
            if self.grows[row]:
                self.ids[row].append(token)
                self._left[row] -= 1
                self.grows[row] = token not in self._ends and self._left[row] > 0
        return any(self.grows)


def _padded(
    prompts: Sequence[list[int]], longest: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The prompts int64 [b, longest], padded on the left, and where they are 1."""
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        seen[row, longest - len(prompt) :] = 1
    return ids.to(device), seen.to(device)


def chances_of(seed: int, count: int) -> Tensor:
    """Uniform numbers float64 [count] of one text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def chosen(logits: Tensor, chances: Tensor, ids: Tensor | None) -> Tensor:
    """One token a row [b, 1]: where the cumulative probability passes its chance."""
    if ids is not None:
        logits = logits[:, ids]
    totals = logits.double().softmax(-1).cumsum(-1)
    places = torch.searchsorted(totals, chances * totals[:, -1:], right=True)
    places = places.clamp(max=logits.shape[-1] - 1)
    return places if ids is None else ids[places]
