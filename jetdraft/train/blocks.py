"""Many blocks of a sequence, learned in one pass; each sees the context before it."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.heads.blocks import masked_attention
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.options import setting
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.task import DrafterSettings, Run, Sums, Task, TrainingOptions
from jetdraft.train.teacher import make_lesson, rows_at

FORWARD_KL, TEXT = "forward-kl", "text"  # Values of the setting `loss`.
TOKENS_PER_WEIGHT = 20  # Guesses: the best at a given cost (2203.15556).
VALIDATED_BLOCKS = 16  # Blocks of a sequence that a validation fills.


@dataclass(frozen=True)
class BlockSettings(DrafterSettings):
    """Settings of all drafters that fill blocks.

    layers: Layers of a new drafter.
    block_rows: Rows of a block that is filled in one pass.
    anchors: Blocks that are learned in each sequence.
    known_share: Share of the blocks whose first tokens are known, as in the second step
        of a draft.
    """

    layers: int | None = setting(None, allowed=(1, 100), unset="what its kind advises")
    block_rows: int = setting(8, allowed=(2, 64))
    anchors: int = setting(16, allowed=(1, 10**4))
    known_share: float = setting(0.25, allowed=(0.0, 1.0))
    loss: str = setting(
        FORWARD_KL,
        f"What a guess is compared with: {FORWARD_KL}, the target, or {TEXT}.",
        choices=(FORWARD_KL, TEXT),
    )


@dataclass(frozen=True)
class Blocks:
    """n blocks in each of b sequences, which guess tokens after their anchors.

    `anchors` int64 [b, n] are indexes of tokens, `known` int64 [b, n] how many tokens
    after them are shown; `is_real` bool [b, n] is false for filling. `chances` float
    [b, n, slots] are random numbers, by which a task may show more; None: it must not.
    """

    anchors: Tensor
    known: Tensor
    is_real: Tensor
    chances: Tensor | None = None

    @classmethod
    def draw(
        cls,
        batch: Batch,
        count: int,
        slots: int,
        known_share: float,
        generators: list[torch.Generator],
        first: int = 1,
    ) -> "Blocks":
        """Draw `count` anchors from `first` on in each sequence, with its generator."""
        parts = []
        for labels, generator in zip(batch.labels.cpu(), generators, strict=True):
            places = block_starts(labels, first)
            order = torch.randperm(len(places), generator=generator)[:count]
            shares = torch.rand(count, 2, generator=generator)
            counts = 1 + (shares[:, 1] * (slots - 1)).long()
            shown = (shares[:, 0] < known_share) & (slots > 1)
            known = torch.where(shown, counts.clamp(max=slots - 1), 0)
            anchors, is_real = _pad_places(places[order], count)
            chances = torch.rand(count, slots, generator=generator)
            parts.append((anchors, known, is_real, chances))
        return cls(*_stack_parts(parts, batch.ids.device))

    @classmethod
    def spread(cls, batch: Batch, count: int, first: int = 1) -> "Blocks":
        """Spread `count` anchors evenly from `first` on; no token is shown."""
        parts = []
        for labels in batch.labels.cpu():
            places = block_starts(labels, first)
            ends = torch.linspace(0, max(0, len(places) - 1), count).long().tolist()
            chosen = torch.tensor(sorted(set(ends)))
            parts.append(_pad_places(places[chosen] if len(places) else places, count))
        anchors, is_real = _stack_parts(parts, batch.ids.device)
        return cls(anchors, torch.zeros_like(anchors), is_real)

    def places(self, slots: int, length: int) -> Tensor:
        """The indexes below `length` of a block's tokens in the text, [b, n, slots]."""
        behind = torch.arange(1, slots + 1, device=self.anchors.device)
        return (self.anchors[..., None] + behind).clamp(max=length - 1)


def _pad_places(places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pad places to int64 [count]; returns them, and bool [count], which are real."""
    return F.pad(places, (0, count - len(places))), torch.arange(count) < len(places)


def _stack_parts(rows: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Stack each part over all sequences; returns a tensor on the device per part."""
    return [torch.stack(part).to(device) for part in zip(*rows, strict=True)]


def block_starts(labels: Tensor, first: int = 1) -> Tensor:
    """Return the indexes [k] from `first` on whose next token is learned."""
    learned = labels[1:] != IGNORED
    learned[:first] = False
    return learned.nonzero()[:, 0]


def block_mask(last: Tensor, size: int, count: int, context_asks: bool) -> Tensor:
    """What rows see: bool [b, 1, q, count + n * size], for n blocks of `size` rows.

    A block sees its own rows, and the context up to `last` int64 [b, n]. The q are the
    blocks' rows, with `context_asks` after the context's, which are causal.
    """
    rows = torch.arange(count, device=last.device)
    seen = (rows <= last[..., None]).repeat_interleave(size, dim=1)
    one = torch.eye(last.shape[1], dtype=torch.bool, device=last.device)
    own = one.repeat_interleave(size, 0).repeat_interleave(size, 1)
    mask = torch.cat([seen, own.expand(len(last), -1, -1)], dim=2)
    if context_asks:
        causal = torch.ones(count, mask.shape[2], dtype=torch.bool, device=last.device)
        causal = causal.tril()
        causal[:, count:] = False
        mask = torch.cat([causal.expand(len(last), -1, -1), mask], dim=1)
    return mask[:, None]


class BlockTask(Task):
    """Trains a drafter of blocks; a subclass makes config, drafter and files."""

    options = TrainingOptions(steps=None)
    kind, folder_holds, least_tokens = "drafters", "drafter", 3
    largest_norm = 1.0
    first_anchor = 1  # The first row of a text after which a block may begin.
    config: Any

    def shortest_sequence(self) -> tuple[int, str]:
        """Return the rows of a block, and a row of context before and after it."""
        rows = self.settings.block_rows
        return rows + 2, f"blocks of {rows}"

    @abstractmethod
    def new_config(self, run: Run) -> HeadConfig:
        """Make the config of the drafter; raises `OptionError`."""

    def check(self, run: Run) -> None:
        self.config = self.new_config(run)

    def advised_steps(self, run: Run) -> int:
        """Return the steps to learn `TOKENS_PER_WEIGHT` guesses per trained weight."""
        return self.steps_for(run, run.parameters)

    def steps_for(self, run: Run, weights: int) -> int:
        """Return the steps to learn `TOKENS_PER_WEIGHT` guesses per weight, or 200."""
        blocks = self.settings.anchors * run.options.batch_size
        guesses: int = blocks * self.config.slots
        return max(200, TOKENS_PER_WEIGHT * weights // guesses)

    def lesson(self, run: Run, batch: Batch, learns: bool) -> tuple[Any, ...]:
        lesson = make_lesson(run.teacher, batch, self.config.taps)
        return lesson, self.blocks(run, batch, learns)

    def blocks(self, run: Run, batch: Batch, learns: bool) -> Blocks:
        """Return a batch's blocks: drawn in training (`learns`), else evenly spread."""
        first, settings = self.first_anchor, self.settings
        if not learns:
            return Blocks.spread(batch, VALIDATED_BLOCKS, first)
        draws = run.sequence_generators(len(batch.ids))
        sizes = settings.anchors, self.config.slots, settings.known_share
        return Blocks.draw(batch, *sizes, draws, first)

    def sums(self, drafter: Any, lesson: Any, blocks: Blocks, learns: bool) -> Sums:
        """Return the sums of cross entropies by distance from the last known token."""
        slots, length = drafter.config.slots, lesson.ids.shape[1]
        distance = torch.arange(slots, device=lesson.ids.device)
        places = blocks.places(slots, length)
        inside = blocks.anchors[..., None] + 1 + distance < length
        opened = inside & (rows_at(lesson.labels, places) != IGNORED)
        opened = opened & blocks.is_real[..., None]
        known = self.shown(drafter, lesson, blocks, opened, learns)
        learned = opened & ~known
        logits = self.logits(drafter, lesson, blocks, known, learned)
        teacher = rows_at(lesson.logits, places - 1)[learned].float()
        scores = logits.float().log_softmax(-1)
        if self.settings.loss == TEXT:
            tokens = rows_at(lesson.ids, places)[learned]
            losses = -scores.gather(-1, tokens[:, None])[:, 0]
        else:
            losses = -(teacher.softmax(-1) * scores).sum(-1)
        right = scores.argmax(-1) == teacher.argmax(-1)
        far = (distance - blocks.known[..., None])[learned]
        return Sums.of(losses, right, far, learned)

    def shown(
        self, drafter: Any, lesson: Any, blocks: Blocks, opened: Tensor, learns: bool
    ) -> Tensor:
        """Return which tokens are shown, bool [b, n, slots]; by default the first."""
        slots = torch.arange(drafter.config.slots, device=opened.device)
        return slots < blocks.known[..., None]

    def logits(
        self, drafter: Any, lesson: Any, blocks: Blocks, known: Tensor, learned: Tensor
    ) -> Tensor:
        """Run the drafter; returns logits [k, vocabulary] where `learned` is true."""
        ids, size = lesson.ids, drafter.block_rows
        count, config = ids.shape[1], drafter.config
        places = blocks.places(config.slots, count)
        block = rows_at(ids, places).masked_fill(~known, config.vocab_size)
        first = blocks.anchors
        if not drafter.reads_text:
            block = torch.cat([rows_at(ids, blocks.anchors)[..., None], block], dim=-1)
            first = first - 1
        own = first[..., None] + 1 + torch.arange(size, device=ids.device)
        rows = torch.arange(count, device=ids.device).expand(len(ids), -1)
        states = drafter(
            ids if drafter.reads_text else drafter.fuse(lesson.taps),
            block.flatten(1),
            torch.cat([rows, own.flatten(1)], dim=1),
            masked_attention(block_mask(first, size, count, drafter.reads_text)),
        )
        states = states[:, -own[0].numel() :].unflatten(1, own.shape[1:])
        logits: Tensor = drafter.lm_head(drafter.mask_states(states)[learned])
        return logits

    def total(self, sums: Sums, places: Tensor) -> Tensor:
        """Return the sum of mean losses by distance.

        The weight falls to a third at half: a token counts only after right tokens.
        """
        slots = torch.arange(len(places), device=places.device)
        weights = torch.exp(-2 * slots / (len(places) + 1))
        return (weights * sums.losses / places.clamp(min=1)).sum()

    def description(self, run: Run) -> str:
        size = f"layers: {self.config.num_layers}"
        return f"{self.product}, {size}, for blocks of {self.settings.block_rows},"

    def settings_of_run(self, run: Run) -> dict[str, Any]:
        return super().settings_of_run(run) | {"taps": list(self.config.taps)}
