"""A head that learns from use; the target's states are computed again from its text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.bundle import Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.checkpoints.parameters import convert
from jetdraft.errors import CheckpointError
from jetdraft.export.draft_vocab import cut_head
from jetdraft.export.drafter_arrays import Arrays, check_swappable, head_arrays
from jetdraft.learning.lessons import Lesson
from jetdraft.methods.eagle.module import Eagle
from jetdraft.train.head.head_losses import unrolled
from jetdraft.train.head.teacher import states_at
from jetdraft.train.taught.taught_training import teacher_of
from jetdraft.train.use.student import ModelStudent, Student
from jetdraft.train.use.wrong_places import LessonBatch, Missed, missed, together

UNROLLED = 4
"""Steps of a draft in which a wrong place may be reached; it counts once in each."""


class HeadStudent(Student):
    """A head of EAGLE or MTP; what fuses the taps is in the target's graph and stays.

    `target` is the target's checkpoint. Raises `CheckpointError` or `OptionError`.

        HeadStudent(bundle, "head/", "target/").load({})
    """

    def __init__(self, bundle: Bundle, source: str, target: str) -> None:
        super().__init__(bundle, source)
        try:
            self._target, _ = teacher_of(target)
        except CheckpointError as error:
            raise CheckpointError(
                f"cannot read the target's checkpoint ({error}), whose states the head "
                "reads; name it with --target"
            ) from error
        self.load({})

    def load(self, weights: Mapping[str, Tensor]) -> Any:
        """A `Head` of the target in float32."""
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
