"""Texts that the target writes itself: a head learns what it will have to guess."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jetdraft.train.data import Example

PROMPT_TOKENS = 16
"""Tokens that are kept of a text without a prompt."""


@torch.no_grad()
def regenerated(
    model: Any,
    examples: Sequence[Example],
    ends: Sequence[int],
    batch_size: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> list[Example]:
    """The same prompts, completed to the same length or less by sampling at T = 1.

    A completion ends after one of the tokens `ends`. The texts depend on the seed and
    the model alone.
    """
    groups = defaultdict(list)
    for index, example in enumerate(examples):
        groups[_prompt_size(example), len(example.ids)].append(index)
    written: dict[int, Example] = {}
    torch.manual_seed(seed)
    for (size, length), members in groups.items():
        for start in range(0, len(members), batch_size):
            chosen = members[start : start + batch_size]
            prompts = torch.tensor([examples[i].ids[:size] for i in chosen])
            texts = model.generate(
                prompts.to(model.device),
                attention_mask=torch.ones_like(prompts).to(model.device),
                max_new_tokens=max(1, length - size),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=list(ends) or None,
                pad_token_id=ends[0] if ends else 0,
            ).tolist()
            for index, text in zip(chosen, texts, strict=True):
                written[index] = _cut(text, size, ends)
                tick()
    return [written[index] for index in range(len(examples))]


def _prompt_size(example: Example) -> int:
    """The number of tokens before the completion."""
    given = example.learned.index(True)
    return given or min(PROMPT_TOKENS, len(example.ids) // 2)


def _cut(text: list[int], size: int, ends: Sequence[int]) -> Example:
    """The text up to the first token that ends it."""
    stop = next((i + 1 for i in range(size, len(text)) if text[i] in ends), len(text))
    ids = text[:stop]
    return Example(ids, [False] * size + [True] * (len(ids) - size))
