"""A drafter that learns from what the target says of a text."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.taught.chosen_rows import logits_at
from jetdraft.train.taught.precision import precision


class Pupil(nn.Module):
    """A drafter as one module, so that several processes can share it.

    `ids` int64 [draft vocabulary] are the tokens that it can draft, None for all.

        scores = Pupil(model, None)(batch)
    """

    ids: Tensor | None

    def __init__(self, model: Any, ids: Tensor | None) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Log probabilities float32 [n, draft vocabulary] at the learned places."""
        return log_probabilities(self.model, batch, self.ids)


def learned(batch: Batch) -> Tensor:
    """Where a token is learned, bool [b, T - 1]; row t says token t + 1."""
    return batch.labels[:, 1:] != IGNORED


def log_probabilities(model: Any, batch: Batch, ids: Tensor | None) -> Tensor:
    """What a model says at the n learned places, float32 [n, vocabulary].

    With `ids`, of these tokens only, which then sum to 1.
    """
    rows, places = learned(batch).nonzero(as_tuple=True)
    with precision(batch.ids.device):
        logits = logits_at(model, batch.ids, rows, places)
    if ids is not None:
        logits = logits[:, ids]
    scores: Tensor = logits.float().log_softmax(-1)
    return scores
