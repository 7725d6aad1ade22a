"""A bundle's drafter as it learns from use: its weights in floats, and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.parameters import convert
from jetdraft.errors import CheckpointError
from jetdraft.export.drafter_arrays import Arrays, check_trainable, drafter_arrays
from jetdraft.learning.lessons import Lesson
from jetdraft.train.taught.chosen_rows import logits_at
from jetdraft.train.use.wrong_places import LessonBatch, Missed, missed


class Student(ABC):
    """What a training must know of the kind of drafter that a bundle has.

    `source` is the drafter's checkpoint in floats, which the bundle was exported from.
    `can_draft` bool [vocabulary] are the tokens that it can draft, None for all.

        student = ModelStudent(bundle, "drafter/")
        model = student.load({})
        student.missed(model, lessons).loss.backward()
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

        ModelStudent(bundle, "drafter/").load({})
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
