"""The loss over the next n-gram (Speculative Streaming, 2402.11131, 3.1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.export.streams import SHARED, Streamed
from jetdraft.train.data import IGNORED, Batch

MAIN_WEIGHT = 1.0
STREAM_WEIGHT = 0.1
"""alpha_0 and alpha_j."""


@dataclass(frozen=True)
class Losses:
    """Cross entropies: of the main rows, of stream 1..gamma, and of early exits.

    `acceptance` is the share of places where a stream's best token is the one that the
    main row there finds best: what greedy decoding would accept of it.
    """

    main: Tensor
    streams: Tensor
    early: Tensor
    acceptance: Tensor

    def total(self, mode: str) -> Tensor:
        """What is minimised; in lossless mode the main rows cannot learn."""
        total = STREAM_WEIGHT * self.streams.sum() + self.early
        return total + MAIN_WEIGHT * self.main if mode == SHARED else total


def losses(streamed: Streamed, batch: Batch, gamma: int) -> Losses:
    """Run whole sequences in which every row carries all `gamma` streams."""
    size, rows = batch.ids.shape
    at = torch.arange(rows, device=batch.ids.device)
    logits, early, _ = streamed(
        batch.ids,
        at.expand(size, rows),
        at.repeat_interleave(gamma),
        torch.arange(gamma, device=at.device).repeat(rows),
        at,
        early_exit=True,
        use_cache=False,
    )
    main = logits[:, :rows]
    probes = logits[:, rows:].unflatten(1, (rows, gamma))
    streams, right = [], []
    best = main.detach().argmax(-1)
    for j in range(gamma):
        # Row t predicts token t + 1, its stream j token t + 1 + j, counted from 1.
        logits = probes[:, :, j]
        streams.append(_cross_entropy(logits, batch.labels, 2 + j))
        right.append(_agreement(logits, best, batch.labels, 1 + j))
    return Losses(
        main=_cross_entropy(main, batch.labels, 1),
        streams=torch.stack(streams),
        early=_cross_entropy(early, batch.labels, 1),
        acceptance=torch.stack(right),
    )


def _cross_entropy(logits: Tensor, labels: Tensor, ahead: int) -> Tensor:
    """Of row t's logits against the label `ahead` places on."""
    wanted = labels[:, ahead:].flatten()
    if not (wanted != IGNORED).any():
        return logits.sum() * 0
    return F.cross_entropy(
        logits[:, :-ahead].flatten(0, 1).float(), wanted, ignore_index=IGNORED
    )


def _agreement(logits: Tensor, best: Tensor, labels: Tensor, ahead: int) -> Tensor:
    """How often a stream's best token is the main row's, `ahead` rows further on."""
    learned = labels[:, ahead:] != IGNORED
    same = logits[:, :-ahead].detach().argmax(-1) == best[:, ahead:]
    return (same & learned).sum() / learned.sum().clamp(min=1)
