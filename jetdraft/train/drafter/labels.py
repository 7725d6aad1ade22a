"""What the target says of a text, as far as a drafter has to learn it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetdraft.train.data import Batch
from jetdraft.train.drafter.pupil import log_probabilities

SMALL = 1e-6
"""The least probability of the rest, so that its logarithm is a number."""


@dataclass(frozen=True)
class Labels:
    """What the target says at the n learned places of a batch.

    `wanted` float32 [n, k] are log probabilities that sum to 1, `mass` [n] is the
    probability of all tokens that can be drafted, and `known` bool [n] says whether the
    likeliest of all tokens is among them. Without `tokens`, k is the size of the draft
    vocabulary; else `tokens` int64 [n, k - 1] are its most likely tokens, by their rows
    in the drafter's LM head, and the last column is the rest.
    """

    wanted: Tensor
    mass: Tensor
    known: Tensor
    tokens: Tensor | None = None

    def binned(self, scores: Tensor) -> Tensor:
        """The drafter's log probabilities [n, draft vocabulary] as in `wanted`."""
        if self.tokens is None:
            return scores
        return with_rest(scores.gather(-1, self.tokens))

    @property
    def best(self) -> Tensor:
        """The most likely token at each place, by its row; int64 [n]."""
        return self.wanted.argmax(-1) if self.tokens is None else self.tokens[:, 0]

    def accepted(self, scores: Tensor) -> Tensor:
        """The chance that a sampled draft is accepted, 1 - total variation: [n]."""
        wanted = self.mass[:, None] * self.wanted.exp()
        return torch.minimum(wanted, self.binned(scores).exp()).sum(-1)

    def agreed(self, scores: Tensor) -> Tensor:
        """Whether the drafter's best token is the target's, bool [n]."""
        return (scores.argmax(-1) == self.best) & self.known


def with_rest(scores: Tensor) -> Tensor:
    """Log probabilities [n, k] with one more for all other tokens: [n, k + 1]."""
    rest = (1.0 - scores.exp().sum(-1, keepdim=True)).clamp(min=SMALL).log()
    return torch.cat([scores, rest], dim=-1)


@torch.no_grad()
def exact_labels(model: Any, batch: Batch, ids: Tensor | None) -> Labels:
    """What the target says of a batch, computed; `ids` are the draft vocabulary.

    labels = exact_labels(target.model, batch, None)
    """
    scores = log_probabilities(model, batch, None)
    if ids is None:
        ones = torch.ones(len(scores), device=scores.device)
        return Labels(scores, ones, ones.bool())
    known = torch.isin(scores.argmax(-1), ids)
    scores = scores[:, ids]
    mass = scores.logsumexp(-1)
    return Labels(scores - mass[:, None], mass.exp(), known)
