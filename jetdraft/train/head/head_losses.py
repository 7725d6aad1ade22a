"""The losses of heads: EAGLE-3's training-time test, EAGLE-1's and Medusa's.

Slot t starts from the features of row t. In step i of an unrolled head it reads token
t + 1 + i and predicts token t + 2 + i; the target's row t + 1 + i is its teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

from jetdraft.methods.eagle.module import Eagle
from jetdraft.methods.medusa.module import Medusa
from jetdraft.train.data import IGNORED
from jetdraft.train.taught.chosen_rows import shifted
from jetdraft.train.taught.precision import precision

DECAY = 0.8
"""The weight of step i is DECAY to the power i (EAGLE-3, 3.2; Medusa, 2.2.1)."""

CROSS_ENTROPY = 0.1
NOISE = 0.2
"""EAGLE-1's weight of the cross entropy, and the width of the noise on features."""


@dataclass(frozen=True)
class Lesson:
    """What a head learns from: a batch, and what the target says of it.

    `ids` and `labels` are int64 [b, T], `taps` float [b, T, target hidden] each (the
    state after the final norm alone for heads without taps), `final` that state,
    `logits` [b, T, draft vocabulary] the target's, and `known` bool [b, T], whether
    the target's choice in the row is in the draft vocabulary.
    """

    ids: Tensor
    labels: Tensor
    taps: list[Tensor]
    final: Tensor
    logits: Tensor
    known: Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over the places of each step: [steps] each.

    `right` counts places where the head's best token is the target's.
    """

    lost: Tensor
    right: Tensor
    places: Tensor


class Objective(nn.Module):
    """A head and its loss, as one module, so that several processes can share it.

    sums = Objective(head, steps=7)(lesson)
    """

    def __init__(self, head: Eagle | Medusa, steps: int, regress: bool = False) -> None:
        super().__init__()
        self.head = head
        self.steps = steps
        self.regress = regress

    def forward(self, lesson: Lesson) -> Sums:
        """The sums of a batch, in each step over the places that are learned."""
        with precision(lesson.final.device):
            parts = [
                self._compared(step, hidden, logits, lesson)
                for step, (hidden, logits) in enumerate(self._predictions(lesson))
            ]
        return Sums(*(torch.stack(sums) for sums in zip(*parts, strict=True)))

    def _predictions(self, lesson: Lesson) -> Iterator[tuple[Tensor, Tensor]]:
        """In each step the carried states and the logits of all slots."""
        head = self.head
        if isinstance(head, Medusa):
            hidden = head(lesson.final)
            logits = head.logits(hidden)
            for step in range(self.steps):
                yield hidden[:, :, step], logits[:, :, step]
            return
        features = head.fuse(lesson.taps)
        if self.regress and self.training:
            features = features + (torch.rand_like(features) - 0.5) * NOISE
        steps = self.steps if not (self.regress and self.training) else 1
        for hidden, carried in unrolled(head, lesson.ids, features, steps):
            yield carried, head.lm_head(hidden)

    def _compared(
        self, step: int, carried: Tensor, logits: Tensor, lesson: Lesson
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, the right tokens and the places of a step, summed over slots."""
        teacher = shifted(lesson.logits, 1 + step).float()
        learned = shifted(lesson.labels, 2 + step, IGNORED) != IGNORED
        learned = learned & shifted(lesson.known, 1 + step, False)
        scores = logits.float().log_softmax(-1)
        if isinstance(self.head, Medusa):
            labels = shifted(lesson.labels, 2 + step, 0).clamp(min=0)
            lost = -scores.gather(-1, labels[..., None])[..., 0]
        else:
            lost = -(teacher.softmax(-1) * scores).sum(-1)
        if self.regress:
            wanted = shifted(lesson.final, 1 + step)
            distance = F.smooth_l1_loss(carried, wanted, reduction="none").mean(-1)
            lost = distance + CROSS_ENTROPY * lost
        right = logits.argmax(-1) == teacher.argmax(-1)
        return (
            torch.where(learned, lost, 0.0).sum(),
            (right & learned).sum().float(),
            learned.sum().float(),
        )


def unrolled(
    head: Eagle, ids: Tensor, features: Tensor, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """In each step the states for the LM head, and the carried ones: [b, T, h].

    `ids` int64 [b, T] is a text, and `features` [b, T, w] are those of its rows.
    """
    count, cache = ids.shape[1], DynamicCache()
    positions = torch.arange(count, device=features.device)
    for step in range(steps):
        hidden, features = head(
            shifted(ids, 1 + step),
            features,
            (positions + step)[None],
            cache,
            unrolled_mask(count, step, features),
        )
        yield hidden, features


def total(sums: Sums, places: Tensor) -> Tensor:
    """The loss to minimise; `places` are those of all processes, [steps]."""
    weights = DECAY ** torch.arange(len(sums.lost), device=sums.lost.device)
    return (weights * sums.lost / places.clamp(min=1)).sum()


def unrolled_mask(count: int, step: int, like: Tensor) -> Tensor:
    """The mask [1, 1, count, (step + 1) * count] of a step.

    A slot sees the rows with the target's features up to its own, then only what it
    wrote itself: as a draft does that starts in its row.
    """
    own = torch.eye(count, dtype=torch.bool, device=like.device)
    rows = torch.ones_like(own).tril()
    visible = torch.cat([rows, *([own] * step)], dim=1)
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill(~visible, torch.finfo(like.dtype).min)[None, None]
