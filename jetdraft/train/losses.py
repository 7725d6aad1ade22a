"""The loss over the next n-gram (Speculative Streaming, 2402.11131, 3.1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.streams import SHARED, Streamed
from jetdraft.train.data import IGNORED, Batch

MAIN_WEIGHT = 1.0
STREAM_WEIGHT = 0.1
"""alpha_0 and alpha_j."""


@dataclass(frozen=True)
class Losses:
    """Cross entropies: of the main rows, of stream 1..gamma, and of early exits.

    `places` [1 + gamma] counts the rows with a label, of main rows and of streams.
    `acceptance` is the share of places where a stream's best token is also the best
    token of the main row there: the share that greedy decoding would accept.
    """

    main: Tensor
    streams: Tensor
    early: Tensor
    places: Tensor
    acceptance: Tensor

    def total(self, mode: str, weights: Tensor) -> Tensor:
        """The loss to minimise; in lossless mode the main rows cannot learn.

        `weights` [1 + gamma] multiply the means over main rows and over each stream. A
        whole batch has ones. The parts of a batch have weights with which the mean of
        their losses is the loss of the batch.
        """
        streams = (weights[1:] * self.streams).sum()
        total = STREAM_WEIGHT * streams + weights[0] * self.early
        return total + MAIN_WEIGHT * weights[0] * self.main if mode == SHARED else total


def losses(streamed: Streamed, batch: Batch, gamma: int) -> Losses:
    """Run whole sequences, in which rows carry all `gamma` streams or none.

    A row carries streams if its next token is learned. So there are no streams, and no
    logits, of the rows of a prompt.
    """
    size, rows = batch.ids.shape
    at = torch.arange(rows, device=batch.ids.device)
    learned = _following(batch.labels, 1)[..., 0] != IGNORED
    carriers = _carriers(learned)
    count = carriers.shape[1]
    keep = learned.any(0).nonzero()[:, 0]
    logits, early, _ = streamed(
        batch.ids,
        at.expand(size, rows),
        carriers.repeat_interleave(gamma, 1),
        torch.arange(gamma, device=at.device).repeat(count),
        keep,
        early=keep,
        use_cache=False,
    )
    assert early is not None
    main, probes = logits.split([len(keep), count * gamma], 1)
    probes = probes.unflatten(1, (count, gamma))
    best = torch.zeros_like(batch.ids)
    best[:, keep] = main.detach().argmax(-1)
    # Row t predicts token t + 1, and its stream j (from 1 on) token t + 1 + j.
    wanted = _following(batch.labels, 1)[:, keep]
    ahead = _of_carriers(_following(batch.labels, gamma + 1)[..., 1:], carriers)
    ahead = ahead.where(_of_carriers(learned[..., None], carriers), IGNORED)
    agreed = _of_carriers(_following(best, gamma), carriers)
    compared = ahead != IGNORED
    right = (probes.detach().argmax(-1) == agreed) & compared
    return Losses(
        main=_cross_entropy(main[:, :, None], wanted)[0],
        streams=_cross_entropy(probes, ahead),
        early=_cross_entropy(early[:, :, None], wanted)[0],
        places=torch.cat([(wanted != IGNORED).sum().view(1), compared.sum((0, 1))]),
        acceptance=right.sum((0, 1)) / compared.sum((0, 1)).clamp(min=1),
    )


def _carriers(learned: Tensor) -> Tensor:
    """The rows [b, C] that carry streams: those of bool [b, T], in their order.

    C is the most of one sequence. The others have further rows, which are not learned.
    """
    count = max(1, int(learned.sum(1).max()))
    order = learned.int().argsort(dim=1, descending=True, stable=True)
    return order[:, :count]


def _of_carriers(rows: Tensor, carriers: Tensor) -> Tensor:
    """What [b, T, n] says of the rows [b, C] that carry streams: [b, C, n]."""
    return torch.take_along_dim(rows, carriers[..., None], 1)


def _following(ids: Tensor, count: int) -> Tensor:
    """The next `count` ids after each place: [b, T] to [b, T, count]."""
    padded = F.pad(ids[:, 1:], (0, count), value=IGNORED)
    return padded.unfold(1, count, 1)


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over the places with a label: [b, C, s, vocab] and [b, C, s] to [s]."""
    lost = F.cross_entropy(
        logits.flatten(0, 2).float(),
        wanted.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    ).view(wanted.shape)
    return lost.sum((0, 1)) / (wanted != IGNORED).sum((0, 1)).clamp(min=1)
