"""A bundle's drafter as it learns from use: its weights in floats, and its loss.

The loss is taken at the places where drafts were wrong (Online Speculative Decoding,
2310.07177).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.parameters import convert
from jetdraft.errors import CheckpointError
from jetdraft.export.draft_vocab import cut_head
from jetdraft.export.drafter_arrays import (
    Arrays,
    check_swappable,
    check_trainable,
    drafter_arrays,
    head_arrays,
)
from jetdraft.learning.lessons import Lesson
from jetdraft.methods.eagle.module import Eagle
from jetdraft.train.heads import unrolled
from jetdraft.train.teacher import load_target, logits_at, states_at

UNROLLED = 4
"""Steps of a draft in which a wrong place may be reached; it counts once in each."""


# --- wrong places -------------------------------------------------------------------


@dataclass(frozen=True)
class LessonBatch:
    """Some lessons, side by side.

    `tokens` int64 [b, T] are padded on the right. The w wrong places of all lessons
    have the indexes `rows` and `places` int64 [w] in `tokens`; the row before a place
    predicts it. There the target's candidates are `ids` int64 [w, k] with `logits`
    float32 [w, k]; a place with fewer candidates has logits of minus infinity.

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


# --- students -----------------------------------------------------------------------


class Student(ABC):
    """What a training must know of the kind of drafter that a bundle has.

    `source` is the drafter's checkpoint in floats, which the bundle was exported from.
    `can_draft` bool [vocabulary] are the tokens that it can draft, None for all.
    """

    def __init__(self, bundle: Bundle, source: str) -> None:
        self.bundle, self.source = bundle, source
        self.dtype = getattr(torch, bundle.graphs[DRAFTER].contract.dtype)
        self.can_draft = _can_draft(bundle)

    @abstractmethod
    def load(self, weights: Mapping[str, Tensor]) -> Any:
        """The drafter in float32, with other weights in place of some.

        Raises `CheckpointError`.
        """

    @abstractmethod
    def layers(self, model: Any) -> Iterable[nn.Module]:
        """The layers of the drafter that learn."""

    @abstractmethod
    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """How the drafter does at the wrong places of lessons."""

    @abstractmethod
    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> Arrays:
        """The arrays of the bundle's graph that differ with these weights.

        A recipe that needs a text reads `text`, token ids int64 [n].
        """

    def put(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Replace some weights of a model; raises `CheckpointError`."""
        own = dict(model.named_parameters())
        for name, weight in weights.items():
            if name not in own or own[name].shape != weight.shape:
                raise CheckpointError(
                    f"the learned weights do not fit {self.source}; give the "
                    "checkpoint that was exported"
                )
            own[name].data = weight


class ModelStudent(Student):
    """A drafter that is a model of its own.

    Raises `CheckpointError`, `PairError` or `OptionError`.
    """

    def __init__(self, bundle: Bundle, source: str) -> None:
        super().__init__(bundle, source)
        check_trainable(bundle, self._checkpoint())

    def load(self, weights: Mapping[str, Tensor]) -> Any:
        """A causal LM of transformers."""
        model = self._with(weights).model
        model.set_attn_implementation("sdpa")
        return model

    def layers(self, model: Any) -> Iterable[nn.Module]:
        """The decoder's layers."""
        return decoder_layers(model)

    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """Each wrong place counts once."""
        batch = LessonBatch.of(lessons)
        logits = logits_at(model, batch.tokens, batch.rows, batch.places - 1)
        return missed(logits, batch, self.can_draft)

    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> Arrays:
        """See `drafter_arrays`."""
        return drafter_arrays(self.bundle, self._with(weights), text)

    def _checkpoint(self) -> Checkpoint:
        try:
            checkpoint = Checkpoint.load(self.source, self.dtype)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot read the drafter's checkpoint ({error}); name it with --from"
            ) from error
        return checkpoint.beside(self.bundle.target.contract.vocab_size)

    def _with(self, weights: Mapping[str, Tensor]) -> Checkpoint:
        checkpoint = self._checkpoint()
        convert(checkpoint.model, torch.float32)
        self.put(checkpoint.model, weights)
        return checkpoint


def _can_draft(bundle: Bundle) -> Tensor | None:
    ids, known = bundle.draft_vocabulary(), bundle.graphs[DRAFTER].contract.vocab_size
    size = bundle.target.contract.vocab_size
    if ids is None and known == size:
        return None
    can_draft = torch.zeros(size).bool()
    can_draft[slice(known) if ids is None else torch.from_numpy(ids)] = True
    return can_draft


class HeadStudent(Student):
    """A head of EAGLE or MTP; what fuses the taps is in the target's graph and stays.

    `target` is the target's checkpoint. Raises `CheckpointError` or `OptionError`.
    """

    def __init__(self, bundle: Bundle, source: str, target: str) -> None:
        super().__init__(bundle, source)
        try:
            self._target, _ = load_target(target)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot read the target's checkpoint ({error}), whose states the head "
                "reads; name it with --target"
            ) from error
        self.load({})

    def load(self, weights: Mapping[str, Tensor]) -> Any:
        """An `Eagle` of the target in float32."""
        head = self._head(self._target, torch.float32)
        convert(head, torch.float32)
        self.put(head, weights)
        return head

    def layers(self, model: Any) -> Iterable[nn.Module]:
        """The head's own layers."""
        layers: nn.ModuleList = model.stack.layers
        return layers

    def missed(self, model: Any, lessons: Sequence[Lesson]) -> Missed:
        """Row t of a head's step i says token t + 2 + i."""
        batch = LessonBatch.of(lessons)
        taps = model.config.taps or (-1,)
        states = states_at(self._target.model, batch.tokens, taps)
        steps = unrolled(model, batch.tokens, model.fuse(states), UNROLLED)
        parts = []
        for step, (hidden, _) in enumerate(steps):
            rows = batch.places - 2 - step
            chosen = batch.at(rows >= 0)
            logits = model.lm_head(hidden[chosen.rows, rows[rows >= 0]])
            parts.append(missed(self._wide(logits, model), chosen, self.can_draft))
        return together(parts)

    def arrays(self, weights: Mapping[str, Tensor], text: Tensor) -> Arrays:
        """See `head_arrays`."""
        target = Checkpoint.load(self._target.source, self.dtype)
        head = self._head(target, self.dtype)
        self.put(head, weights)
        return head_arrays(self.bundle, target, head)

    def _wide(self, logits: Tensor, head: Eagle) -> Tensor:
        """Logits of all tokens; minus infinity for those that cannot be drafted."""
        if head.ids is None:
            return logits
        size = self.bundle.target.contract.vocab_size
        wide = logits.new_full((len(logits), size), -torch.inf)
        return wide.index_copy(1, head.ids, logits)

    def _head(self, target: Checkpoint, dtype: torch.dtype) -> Eagle:
        try:
            head = load_head(self.source, target, dtype)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot read the head ({error}); name it with --from"
            ) from error
        if not isinstance(head, Eagle):
            raise CheckpointError(
                f"{self.source} is not a head of EAGLE or MTP; give the head that was "
                "exported"
            )
        ids = self.bundle.draft_vocabulary()
        if ids is not None and head.ids is None:
            cut_head(head, torch.from_numpy(ids), dtype)
        return head


def student_of(bundle: Bundle, source: str = "", target: str = "") -> Student:
    """A bundle's drafter as it learns; a head reads the states of `target`.

    Without the checkpoints those that the bundle was exported from are read. Raises
    `CheckpointError`, `PairError` or `OptionError`.
    """
    entry = check_swappable(bundle)
    source = source or entry.source
    if entry.contract.feature_input:
        return HeadStudent(bundle, source, target or bundle.target.source)
    return ModelStudent(bundle, source)
