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
    for blocks that only fill the tensor up. `chances` float [b, n, slots] decide what
    is told of a block beside them; without a choice there are none.

        blocks = Blocks.drawn(batch, 16, 7, 0.25, [torch.Generator()] * len(batch.ids))
    """

    anchors: Tensor
    known: Tensor
    is_real: Tensor
    chances: Tensor | None = None

    @classmethod
    def drawn(
        cls,
        batch: Batch,
        count: int,
        slots: int,
        known_share: float,
        generators: list[torch.Generator],
        first: int = 1,
    ) -> Blocks:
        """Blocks at random places from `first` on, with a generator per sequence."""
        anchors, known, is_real, chances = [], [], [], []
        for labels, generator in zip(batch.labels.cpu(), generators, strict=True):
            places = starts(labels, first)
            order = torch.randperm(len(places), generator=generator)[:count]
            chosen = places[order]
            left = count - len(chosen)
            anchors.append(torch.cat([chosen, torch.zeros(left, dtype=torch.long)]))
            shares = torch.rand(count, 2, generator=generator)
            counts = 1 + (shares[:, 1] * (slots - 1)).long()
            told = (shares[:, 0] < known_share) & (slots > 1)
            known.append(torch.where(told, counts.clamp(max=slots - 1), 0))
            is_real.append(torch.arange(count) < len(chosen))
            chances.append(torch.rand(count, slots, generator=generator))
        parts = anchors, known, is_real, chances
        return cls(*(torch.stack(part).to(batch.ids.device) for part in parts))

    @classmethod
    def spread(cls, batch: Batch, count: int, first: int = 1) -> Blocks:
        """Blocks without known tokens, evenly over each sequence from `first` on."""
        anchors, is_real = [], []
        for labels in batch.labels.cpu():
            places = starts(labels, first)
            ends = torch.linspace(0, max(0, len(places) - 1), count).long().tolist()
            taken = torch.tensor(sorted(set(ends)))
            chosen = places[taken] if len(places) else places
            left = count - len(chosen)
            anchors.append(torch.cat([chosen, torch.zeros(left, dtype=torch.long)]))
            is_real.append(torch.arange(count) < len(chosen))
        rows = [torch.stack(part).to(batch.ids.device) for part in (anchors, is_real)]
        return cls(rows[0], torch.zeros_like(rows[0]), rows[1])


def starts(labels: Tensor, first: int = 1) -> Tensor:
    """The places [k] of a sequence, from `first` on, that a learned token follows.

    A block that begins with a token needs a row of context before it.
    """
    learned = labels[1:] != IGNORED
    learned[:first] = False
    return learned.nonzero()[:, 0]
