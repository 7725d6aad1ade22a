"""The loss at the places where drafts were wrong (Online Speculative Decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetdraft.kept.lessons import Lesson


@dataclass(frozen=True)
class LessonBatch:
    """Some lessons, side by side.

    `tokens` int64 [b, T] are padded on the right. The w wrong places of all lessons
    have the indexes `rows` and `places` int64 [w] in `tokens`. There the target's
    candidates are `ids` int64 [w, k] with `logits` float32 [w, k]; a place with fewer
    candidates has logits of minus infinity.

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


@dataclass(frozen=True)
class Missed:
    """How a drafter does at wrong places.

    `loss` is the mean of the cross entropies with the target's candidates, scalar, and
    `right` the share of places at which the drafter's best token is the target's.
    """

    loss: Tensor
    right: float


def missed(logits: Tensor, batch: LessonBatch) -> Missed:
    """Compare a drafter's logits float [b, T, vocabulary] with the target's.

    The mean over wrong places of CE(softmax(target), drafter); no other place counts.
    """
    # The row before a token predicts it.
    ours = logits[batch.rows, batch.places - 1].float()
    wanted = batch.logits.softmax(-1)
    got = ours.log_softmax(-1).gather(-1, batch.ids)
    best = batch.ids.gather(-1, batch.logits.argmax(-1, keepdim=True))[:, 0]
    right = (ours.detach().argmax(-1) == best).float().mean().item()
    return Missed(-(wanted * got).sum(-1).mean(), right)
