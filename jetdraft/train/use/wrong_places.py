"""The loss at the places where drafts were wrong (Online Speculative Decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.learning.lessons import Lesson


@dataclass(frozen=True)
class LessonBatch:
    """Some lessons, side by side.

    `tokens` int64 [b, T] are padded on the right. The w wrong places of all lessons
    have the indexes `rows` and `places` int64 [w] in `tokens`; the row before a place
    predicts it. There the target's candidates are `ids` int64 [w, k] with `logits`
    float32 [w, k]; a place with fewer candidates has logits of minus infinity.

        LessonBatch.of(lessons).tokens
    """

    tokens: Tensor
    rows: Tensor
    places: Tensor
    ids: Tensor
    logits: Tensor

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> LessonBatch:
        """The batch of at least one lesson."""
        longest = max(len(lesson.tokens) for lesson in lessons)
        widest = max(lesson.ids.shape[1] for lesson in lessons)
        count = sum(len(lesson.places) for lesson in lessons)
        tokens = torch.zeros(len(lessons), longest, dtype=torch.long)
        ids = torch.zeros(count, widest, dtype=torch.long)
        logits = torch.full((count, widest), -torch.inf)
        rows, first = list[int](), 0
        for row, lesson in enumerate(lessons):
            tokens[row, : len(lesson.tokens)] = torch.from_numpy(lesson.tokens)
            places, width = lesson.ids.shape
            ids[first : first + places, :width] = torch.from_numpy(lesson.ids)
            logits[first : first + places, :width] = torch.tensor(lesson.logits)
            rows += [row] * places
            first += places
        places = torch.cat([torch.from_numpy(lesson.places) for lesson in lessons])
        return cls(tokens, torch.tensor(rows), places, ids, logits)

    def at(self, chosen: Tensor) -> LessonBatch:
        """The wrong places at which `chosen` bool [w] is true."""
        places, rows = self.places[chosen], self.rows[chosen]
        return replace(
            self,
            rows=rows,
            places=places,
            ids=self.ids[chosen],
            logits=self.logits[chosen],
        )


@dataclass(frozen=True)
class Missed:
    """How a drafter does at wrong places.

    `loss` is the mean over `places` of the cross entropies with the target's
    candidates, scalar, and `right` the share of them at which the drafter's best token
    is the target's.
    """

    loss: Tensor
    right: float
    places: int


def missed(logits: Tensor, batch: LessonBatch, can_draft: Tensor | None) -> Missed:
    """Compare a drafter's logits float [w, tokens] at wrong places with the target.

    The mean over wrong places of CE(softmax(target), drafter). `can_draft` bool
    [vocabulary] are the tokens that the drafter can draft, None for all: both
    distributions are taken within them, and a place without any of them does not count.
    A drafter may lack the target's last tokens.
    """
    ours, wanted = logits.float(), batch.logits
    if can_draft is not None:
        ours = F.pad(ours, (0, len(can_draft) - ours.shape[-1]))
        ours = ours.masked_fill(~can_draft, -torch.inf)
        wanted = wanted.masked_fill(~can_draft[batch.ids], -torch.inf)
    counts = wanted.isfinite().any(-1)
    ours, wanted, ids = ours[counts], wanted[counts], batch.ids[counts]
    scores = ours.log_softmax(-1).gather(-1, ids)
    # What has no probability must not be multiplied with minus infinity.
    scores = scores.where(wanted.isfinite(), 0.0)
    places = max(1, len(ids))
    lost = -(wanted.softmax(-1) * scores).sum() / places
    best = batch.ids.gather(-1, batch.logits.argmax(-1, keepdim=True))[counts, 0]
    agreed = (ours.detach().argmax(-1) == best).float()
    return Missed(lost, agreed.sum().item() / places, len(ids))


def together(parts: Sequence[Missed]) -> Missed:
    """The figures of all places of some batches."""
    places = sum(part.places for part in parts)
    lost = sum((part.places * part.loss for part in parts), torch.zeros(()))
    right = sum(part.places * part.right for part in parts)
    return Missed(lost / max(1, places), right / max(1, places), places)
