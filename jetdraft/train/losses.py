"""The loss over the next n-gram (Speculative Streaming, 2402.11131, 3.1.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.streamed import SHARED, Streamed
from jetdraft.train.data import IGNORED, Batch

MAIN_WEIGHT = 1.0
STREAM_WEIGHT = 0.1
"""alpha_0 and alpha_j."""


@dataclass(frozen=True)
class Losses:
    """Cross entropies: of the main rows, of stream 1..gamma, and of early exits.

    `acceptance` is the share of places where a stream's best token is also the best
    token of the main row there: the share that greedy decoding would accept.
    """

    main: Tensor
    streams: Tensor
    early: Tensor
    acceptance: Tensor

    def total(self, mode: str) -> Tensor:
        """The loss to minimise; in lossless mode the main rows cannot learn."""
        total = STREAM_WEIGHT * self.streams.sum() + self.early
        return total + MAIN_WEIGHT * self.main if mode == SHARED else total


def losses(streamed: Streamed, batch: Batch, gamma: int) -> Losses:
    """Run whole sequences whose rows carry all `gamma` streams.

    Rows before the first learned token, for example of a prompt, carry no streams.
    """
    size, rows = batch.ids.shape
    at = torch.arange(rows, device=batch.ids.device)
    first = int((batch.labels != IGNORED).any(0).int().argmax())
    carriers = at[max(0, first - 1) :]
    logits, early, _ = streamed(
        batch.ids,
        at.expand(size, rows),
        carriers.repeat_interleave(gamma),
        torch.arange(gamma, device=at.device).repeat(len(carriers)),
        carriers,
        early_exit=True,
        use_cache=False,
    )
    main, probes = logits.split([len(carriers), len(carriers) * gamma], 1)
    probes = probes.unflatten(1, (-1, gamma))
    # Row t predicts token t + 1, and its stream j (from 1 on) token t + 1 + j.
    wanted = _following(batch.labels, gamma + 1)[:, carriers]
    wanted = wanted.masked_fill(wanted[..., :1] == IGNORED, IGNORED)
    best = _following(main.detach().argmax(-1), gamma)
    learned = wanted[..., 1:] != IGNORED
    right = (probes.detach().argmax(-1) == best) & learned
    return Losses(
        main=_cross_entropy(main[:, :, None], wanted[..., :1])[0],
        streams=_cross_entropy(probes, wanted[..., 1:]),
        early=_cross_entropy(early[:, carriers, None], wanted[..., :1])[0],
        acceptance=right.sum((0, 1)) / learned.sum((0, 1)).clamp(min=1),
    )


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
