"""How a block drafter of an encoder-decoder is trained: `jetdraft train block`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from jetdraft.checkpoints import attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.errors import DataError, OptionError
from jetdraft.export.seams import position_limit
from jetdraft.methods.block import module
from jetdraft.options import setting
from jetdraft.train.attention import Masked, Masks
from jetdraft.train.blocks import Blocks, BlockSettings, BlockTask, block_mask
from jetdraft.train.data import IGNORED, Batch, Example, collate, split_batch
from jetdraft.train.heads import stored_tensors
from jetdraft.train.machine import precision
from jetdraft.train.task import Contents, Pupil, Run, Sums, Tensors
from jetdraft.train.teacher import Lesson, rows_at
from jetdraft.train.written_texts import source_continuations

LAYERS = 2  # Layers of a new drafter's decoder: the paper's is as shallow.


@dataclass(frozen=True)
class SourceBlockSettings(BlockSettings):
    """Settings of a drafter for an encoder-decoder.

    glancing: Share of its wrong guesses that a drafter is shown at first (GLAT); it
        falls to 0.
    """

    glancing: float = setting(0.5, allowed=(0.0, 1.0))


@dataclass(frozen=True)
class SourceBatch(Batch):
    """Texts with sources int64 [b, s]; `filled` bool [b, s] is false for padding."""

    source: Tensor
    filled: Tensor

    @classmethod
    def of(cls, batch: Batch, start: Sequence[int]) -> "SourceBatch":
        """Split rows: the prompt is the source, the text begins with `start`."""
        examples = split_batch(batch)
        sources = [example.ids[: example.prompt_size] for example in examples]
        written = [[*start, *x.ids[x.prompt_size :]] for x in examples]
        texts = [Example.completed(ids, len(start)) for ids in written]
        device = batch.ids.device
        text = collate(texts).to(device)
        read = collate([Example.completed(ids, 0) for ids in sources]).to(device)
        return cls(text.ids, text.labels, read.ids, read.labels != IGNORED)


@dataclass(frozen=True)
class SourceLesson(Lesson):
    """A lesson with `encoded` sources; it shows `glancing` tokens per wrong guess."""

    source: Tensor
    filled: Tensor
    glancing: float = 0.0
    encoded: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """The bias [b, 1, 1, s] that hides the padding of the sources."""
        return (~self.filled).float()[:, None, None] * HIDDEN


@torch.no_grad()
def make_source_lesson(model: Any, batch: SourceBatch, glancing: float) -> SourceLesson:
    """Run the target over texts and sources; return the lesson, on their device."""
    with precision(batch.ids.device):
        read = {"input_ids": batch.source, "attention_mask": batch.filled.long()}
        logits = model(**read, decoder_input_ids=batch.ids, use_cache=False).logits
    known = torch.ones_like(batch.ids, dtype=torch.bool)
    return SourceLesson(
        *(batch.ids, batch.labels, list[Tensor](), logits[..., :0], logits, known),
        *(batch.source, batch.filled, glancing),
    )


class SourcePupil(Pupil):
    """A drafter whose dropout stays off, since short trainings do not need it."""

    def train(self, mode: bool = True) -> "SourcePupil":
        super().train(mode)
        self.drafter.eval()
        return self


class SourceBlockTask(BlockTask):
    """A drafter for an encoder-decoder, on pairs of a source and a text.

    It is shown `glancing` times as many tokens as it guesses wrong (GLAT, 2008.07905).
    """

    Settings = SourceBlockSettings
    help = "Train a drafter that fills a block for TARGET, an encoder-decoder."
    product = "a block drafter"
    first_anchor, has_muon = 0, False

    def check_target(self, target: Checkpoint) -> None:
        """Raise `UnsupportedModelError` for a target that reads no source of text."""
        module.source_config(target, 1, 1)
        attention.set_attention(target.model, "sdpa")

    def max_positions(self, model: Any) -> int | None:
        return position_limit(model)

    def check_texts(self, run: Run) -> None:
        """Raise `DataError` for a text without a source."""
        texts = *run.corpus.training, *run.corpus.validation
        if not all(text.prompt_size for text in texts):
            raise DataError(
                "an encoder-decoder writes about a source, and the data has texts "
                "without one; give .jsonl with prompt and completion"
            )

    def writer(self, target: Checkpoint) -> Any:
        return partial(source_continuations, start=target.start_token_ids)

    def new_config(self, run: Run) -> HeadConfig:
        """Make the config that the settings ask for, by default of two layers."""
        depth = len(module.find_decoder_layers(run.target.model)[1])
        layers = self.settings.layers or min(LAYERS, depth)
        if layers > depth:
            raise OptionError(
                f"a drafter begins with the target's layers, of which its decoder has "
                f"{depth}; give --layers 1 to {depth}"
            )
        return module.source_config(run.target, layers, self.settings.block_rows)

    def new_drafter(self, run: Run) -> module.SourceDrafter:
        drafter = module.SourceDrafter(self.config, run.target.model)
        words = drafter.get_input_embeddings().weight
        nn.init.normal_(drafter.masks, std=float(words.std()))
        return drafter

    def pupil(self, drafter: Any) -> SourcePupil:
        """Make the pupil, whose drafter's attention adds the masks of this task."""
        self._masked = Masked(drafter.model)
        return SourcePupil(drafter, self.sums)

    def encode(self, drafter: Any, lesson: SourceLesson) -> SourceLesson:
        """Run the drafter's encoder; returns the lesson with its states."""
        with self._masked.adding(Masks(lesson.mask)):
            states = drafter.get_encoder()(lesson.source).last_hidden_state
        return replace(lesson, encoded=states)

    def sums(self, drafter: Any, lesson: Any, blocks: Blocks, learns: bool) -> Sums:
        return super().sums(drafter, self.encode(drafter, lesson), blocks, learns)

    def shown(
        self, drafter: Any, lesson: Any, blocks: Blocks, opened: Tensor, learns: bool
    ) -> Tensor:
        """Show what the parent shows, and `glancing` tokens for each wrong guess."""
        shown = super().shown(drafter, lesson, blocks, opened, learns)
        if not (learns and lesson.glancing) or blocks.chances is None:
            return shown
        guessed = opened & ~shown
        with torch.no_grad():
            logits = self.logits(drafter, lesson, blocks, shown, guessed)
        places = blocks.places(drafter.config.slots, lesson.ids.shape[1])
        wrong = torch.zeros_like(guessed)
        wrong[guessed] = logits.argmax(-1) != rows_at(lesson.ids, places)[guessed]
        count = (wrong.sum(-1, keepdim=True) * lesson.glancing).round()
        order = blocks.chances.masked_fill(~guessed, torch.inf).argsort(-1).argsort(-1)
        kept: Tensor = guessed & (order < count)
        return shown | kept

    def logits(
        self, drafter: Any, lesson: Any, blocks: Blocks, known: Tensor, learned: Tensor
    ) -> Tensor:
        ids, size = lesson.ids, drafter.config.slots
        count = ids.shape[1]
        slots = torch.arange(size, device=ids.device)
        masks = drafter.config.vocab_size + slots
        block = torch.where(known, rows_at(ids, blocks.places(size, count)), masks)
        behind = (blocks.anchors[..., None] + 1 + slots).flatten(1)
        rows = torch.arange(count, device=ids.device).expand(len(ids), -1)
        positions = torch.cat([rows, behind], dim=1)
        seen = block_mask(blocks.anchors, size, count, context_asks=True)
        own = (~seen).float() * HIDDEN
        if attention.relative_bias_module(drafter) is not None:
            own = own + attention.distance_bias(drafter, positions, positions, True)
        answered = torch.cat([torch.zeros_like(rows).bool(), learned.flatten(1)], 1)
        with self._masked.adding(Masks(lesson.mask, own)):
            read = BaseModelOutput(last_hidden_state=lesson.encoded)
            given = torch.cat([ids, block.flatten(1)], dim=1), positions, answered
            logits: Tensor = drafter(*given, encoder_outputs=read, use_cache=False)
        return logits

    def lesson(self, run: Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        """Return the lesson of texts with their sources, and the blocks."""
        share = self.settings.glancing * (1 - run.step / run.steps)
        own = SourceBatch.of(batch, run.target.start_token_ids)
        lesson = make_source_lesson(run.teacher, own, share)
        return lesson, self.blocks(run, own, learns)

    def advised_steps(self, run: Run) -> int:
        """Return the steps to learn twenty guesses for each weight of the decoder."""
        decoder = run.module.drafter.get_decoder()
        return self.steps_for(run, sum(w.numel() for w in decoder.parameters()))

    def contents(self, run: Run, weights: Tensors, figures: Any) -> Contents:
        fields = module.source_fields(run.target, self.config)
        return fields, stored_tensors(weights, self.settings.half, lambda name: name)[1]
