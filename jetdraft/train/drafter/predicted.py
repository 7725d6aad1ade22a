"""How long drafts would be accepted, predicted from single places of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PLACES = 4
"""Tokens of a draft whose acceptance is predicted."""


def by_place(chances: Sequence[Tensor]) -> list[float]:
    """The chance that each token of a draft is accepted, if all before it were.

    `chances` has for each text the chances float [n] of its places in turn; a draft
    starts at each of them. Places after a text's end do not count.

        by_place([torch.tensor([1.0, 0.5, 1.0])])  # [0.83, 0.67, 1.0, 0.0]
    """
    accepted, reached = torch.zeros(PLACES), torch.zeros(PLACES)
    for text in chances:
        before = torch.ones(len(text))
        for place in range(min(PLACES, len(text))):
            count = len(text) - place
            reached[place] += before[:count].sum()
            before = before[:count] * text[place:]
            accepted[place] += before.sum()
    return [round(x, 4) for x in (accepted / reached.clamp(min=1e-9)).tolist()]


def tokens_per_pass(rates: Sequence[float]) -> float:
    """The tokens of a round: the accepted ones, and the target's own after them.

    tokens_per_pass([0.5, 0.5])    # 1.75
    """
    total, chance = 1.0, 1.0
    for rate in rates:
        chance *= rate
        total += chance
    return total
