"""The loss of block drafters that read a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from jetdraft.checkpoints.source_attention import (
    distance_bias,
    implement,
    relative_table,
)
from jetdraft.contracts.constants import HIDDEN
from jetdraft.methods.block.module import SourceDrafter
from jetdraft.train.block.block_losses import BlockObjective, block_mask
from jetdraft.train.block.block_places import Blocks
from jetdraft.train.block.masked_attention import IMPLEMENTATION, Masks, masking
from jetdraft.train.data import IGNORED, Batch, Example, collate, examples_of
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.chosen_rows import at
from jetdraft.train.taught.place_sums import Sums
from jetdraft.train.taught.precision import precision


@dataclass(frozen=True)
class SourceBatch(Batch):
    """Texts about sources int64 [b, s]; `filled` bool [b, s] is false for padding."""

    source: Tensor
    filled: Tensor

    @classmethod
    def of(cls, batch: Batch, start: Sequence[int]) -> SourceBatch:
        """The learned part of each row, behind the tokens `start`, about the rest."""
        examples = examples_of(batch)
        sources = [example.ids[: example.prompt_size] for example in examples]
        texts = [
            Example.completed([*start, *example.ids[len(source) :]], len(start))
            for example, source in zip(examples, sources, strict=True)
        ]
        written = collate(texts).to(batch.ids.device)
        read = collate([Example.completed(ids, 0) for ids in sources])
        read = read.to(batch.ids.device)
        return cls(written.ids, written.labels, read.ids, read.labels != IGNORED)


@dataclass(frozen=True)
class SourceLesson(Lesson):
    """A lesson about sources; `encoded` [b, s, h] is what the drafter makes of them."""

    source: Tensor
    filled: Tensor
    encoded: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """What hides the padding of the sources, [b, 1, 1, s]."""
        return (~self.filled).float()[:, None, None] * HIDDEN


class SourceTeacher:
    """Gives the lesson of a batch: what the target says of each text.

    SourceTeacher(model).lesson(batch)
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def lesson(self, batch: SourceBatch) -> SourceLesson:
        """The lesson, on the batch's device."""
        with precision(batch.ids.device):
            logits = self.model(
                input_ids=batch.source,
                attention_mask=batch.filled.long(),
                decoder_input_ids=batch.ids,
                use_cache=False,
            ).logits
        return SourceLesson(
            ids=batch.ids,
            labels=batch.labels,
            taps=[],
            final=logits[..., :0],
            logits=logits,
            known=torch.ones_like(batch.ids, dtype=torch.bool),
            source=batch.source,
            filled=batch.filled,
        )


class SourceObjective(BlockObjective):
    """A drafter that reads a source, and its loss; see `BlockObjective`.

    In training it is told some tokens, and learns the rest (GLAT, 2008.07905). They are
    `glancing` times as many as it guesses wrong, drawn from right and wrong guesses.

        sums = SourceObjective(drafter)(lesson, blocks)
    """

    glancing = 0.0

    def __init__(self, drafter: SourceDrafter, of_text: bool = False) -> None:
        super().__init__(drafter, of_text)
        implement(drafter.model, IMPLEMENTATION)

    def train(self, mode: bool = True) -> SourceObjective:
        """Set the mode; dropout stays off, since short trainings do not need it."""
        super().train(mode)
        self.drafter.eval()
        return self

    def encoded(self, lesson: SourceLesson) -> SourceLesson:
        """The lesson with what the drafter makes of its sources."""
        with masking(Masks(lesson.mask)):
            encoder = self.drafter.get_encoder()
            states = encoder(lesson.source).last_hidden_state
        return replace(lesson, encoded=states)

    def _sums(self, lesson: Lesson, blocks: Blocks) -> Sums:
        assert isinstance(lesson, SourceLesson)
        return super()._sums(self.encoded(lesson), blocks)

    def known(
        self, lesson: Lesson, blocks: Blocks, places: Tensor, open_places: Tensor
    ) -> Tensor:
        """The places that are told: first tokens, and some of the guessed."""
        told = super().known(lesson, blocks, places, open_places)
        if not (self.training and self.glancing) or blocks.chances is None:
            return told
        guessed = open_places & ~told
        with torch.no_grad():
            logits = self.logits(lesson, blocks, places, told, guessed)
        wrong = torch.zeros_like(guessed)
        wrong[guessed] = logits.argmax(-1) != at(lesson.ids, places)[guessed]
        count = (wrong.sum(-1, keepdim=True) * self.glancing).round()
        order = blocks.chances.masked_fill(~guessed, torch.inf).argsort(-1).argsort(-1)
        return told | (guessed & (order < count))

    def logits(
        self,
        lesson: Lesson,
        blocks: Blocks,
        places: Tensor,
        is_known: Tensor,
        learned: Tensor,
    ) -> Tensor:
        """The logits [k, vocabulary] of the learned guesses."""
        assert isinstance(lesson, SourceLesson)
        drafter, ids = self.drafter, lesson.ids
        count, size = ids.shape[1], drafter.config.slots
        slots = torch.arange(size, device=ids.device)
        masks = drafter.config.vocab_size + slots
        block = torch.where(is_known, at(ids, places), masks)
        behind = (blocks.anchors[..., None] + 1 + slots).flatten(1)
        rows = torch.arange(count, device=ids.device).expand(len(ids), -1)
        positions = torch.cat([rows, behind], dim=1)
        seen = block_mask(blocks.anchors, size, count, context_asks=True)
        own = (~seen).float() * HIDDEN
        if relative_table(drafter) is not None:
            own = own + distance_bias(drafter, positions, positions, both_ways=True)
        answered = torch.cat([torch.zeros_like(rows).bool(), learned.flatten(1)], 1)
        with masking(Masks(lesson.mask, own)):
            logits: Tensor = drafter(
                torch.cat([ids, block.flatten(1)], dim=1),
                positions,
                answered,
                encoder_outputs=BaseModelOutput(last_hidden_state=lesson.encoded),
                use_cache=False,
            )
        return logits
