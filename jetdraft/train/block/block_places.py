"""Where the blocks of a batch begin, and what of them is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetdraft.train.data import IGNORED, Batch


@dataclass(frozen=True)
class Blocks:
    """n blocks in each of b sequences.

    `anchors` int64 [b, n] are the places of the last tokens before the masks, `known`
    int64 [b, n] count the known tokens behind them, and `is_real` bool [b, n] is false
    for blocks that only fill the tensor up.

        blocks = Blocks.drawn(batch, 16, 7, 0.25, [torch.Generator()] * len(batch.ids))
    """

    anchors: Tensor
    known: Tensor
    is_real: Tensor

    @classmethod
    def drawn(
        cls,
        batch: Batch,
        count: int,
        slots: int,
        known_share: float,
        generators: list[torch.Generator],
    ) -> Blocks:
        """Blocks at random places; each sequence has a generator of its own."""
        anchors, known, is_real = [], [], []
        for labels, generator in zip(batch.labels.cpu(), generators, strict=True):
            places = starts(labels)
            order = torch.randperm(len(places), generator=generator)[:count]
            chosen = places[order]
            left = count - len(chosen)
            anchors.append(torch.cat([chosen, torch.zeros(left, dtype=torch.long)]))
            shares = torch.rand(count, 2, generator=generator)
            counts = 1 + (shares[:, 1] * (slots - 1)).long()
            told = (shares[:, 0] < known_share) & (slots > 1)
            known.append(torch.where(told, counts.clamp(max=slots - 1), 0))
            is_real.append(torch.arange(count) < len(chosen))
        device = batch.ids.device
        rows = (torch.stack(part).to(device) for part in (anchors, known, is_real))
        return cls(*rows)

    @classmethod
    def spread(cls, batch: Batch, count: int) -> Blocks:
        """Blocks without known tokens, evenly over each sequence."""
        anchors, is_real = [], []
        for labels in batch.labels.cpu():
            places = starts(labels)
            ends = torch.linspace(0, max(0, len(places) - 1), count).long().tolist()
            taken = torch.tensor(sorted(set(ends)))
            chosen = places[taken] if len(places) else places
            left = count - len(chosen)
            anchors.append(torch.cat([chosen, torch.zeros(left, dtype=torch.long)]))
            is_real.append(torch.arange(count) < len(chosen))
        rows = [torch.stack(part).to(batch.ids.device) for part in (anchors, is_real)]
        return cls(rows[0], torch.zeros_like(rows[0]), rows[1])


def starts(labels: Tensor) -> Tensor:
    """The places [k] of a sequence after which a learned token follows; not the first.

    A block needs a row of context before it.
    """
    learned = labels[1:] != IGNORED
    learned[:1] = False
    return learned.nonzero()[:, 0]
