"""Trains Falcon drafters by coupled sequential glancing distillation (2412.12639).

glance    the drafter predicts all rows; where its tokens are wrong, some blocks
          read in their first rows what these rows should predict, the true
          features and tokens, so that the rest of a block learns to use them
learn     the loss is that of a second prediction, in the rows that were not told
L         SmoothL1(features) + 0.1 (0.9 KL(p || q) + 0.1 CE(argmax p; q)), p the
          target and q the drafter
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.errors import OptionError
from jetdraft.methods.falcon.module import ARCHITECTURE, MOST_ROWS, Falcon
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.head.head_losses import CROSS_ENTROPY, NOISE, Lesson
from jetdraft.train.taught.chosen_rows import shifted
from jetdraft.train.taught.layer_training import LayerSettings, LayerTraining
from jetdraft.train.taught.next_token_training import DraftObjective
from jetdraft.train.taught.place_sums import Sums, sums_of

GLANCED = 0.4
"""The share of wrong tokens that is told in the first step; it falls to zero."""

HARD = 0.1
"""The share of the target's choice in the loss of the tokens."""


@dataclass(frozen=True)
class FalconSettings(LayerSettings):
    """What drafter to train: it drafts `block_rows` tokens in a pass.

    FalconSettings(block_rows=2)
    """

    block_rows: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.block_rows <= MOST_ROWS:
            raise OptionError(
                f"block rows {self.block_rows} is out of range; give 2 to {MOST_ROWS}"
            )


@dataclass(frozen=True)
class FalconLesson(Lesson):
    """A lesson in which a `share` of the wrong tokens is told.

    What is told, and the noise on the features, are drawn with a `seed`.
    """

    share: float
    seed: int


class FalconObjective(DraftObjective):
    """A drafter and its loss, over blocks of which one ends before row `first`.

    sums = FalconObjective(drafter)(lesson, first=3)
    """

    drafter: Falcon

    def sums(self, lesson: FalconLesson, first: int) -> Sums:
        """The sums by the place in a block; places that were told do not count."""
        size, count = self.drafter.config.slots, lesson.ids.shape[1]
        rows = torch.arange(count, device=lesson.ids.device)
        places = (rows - first) % size
        (features,), ids = lesson.taps, shifted(lesson.ids, 1)
        if self.training:
            draw = torch.Generator().manual_seed(lesson.seed)
            noise = torch.rand(features.shape, generator=draw).to(features)
            features = features + (noise - 0.5) * NOISE
        wanted, teacher = shifted(lesson.final, size), shifted(lesson.logits, size)
        learned = shifted(lesson.labels, size + 1, IGNORED) != IGNORED
        if self.training and lesson.share:
            with torch.no_grad():
                guessed = self._predicted(features, ids, places)[learned]
                chosen = self.drafter.lm_head(guessed).argmax(-1)
            wrong = torch.zeros_like(learned)
            wrong[learned] = chosen != teacher[learned].argmax(-1)
            told = told_rows(wrong, places, size, lesson.share, lesson.seed) & learned
            features = torch.where(told[..., None], wanted, features)
            ids = torch.where(told, shifted(lesson.ids, size + 1), ids)
            learned = learned & ~told
        predicted = self._predicted(features, ids, places)[learned]
        scores = self.drafter.lm_head(predicted).float().log_softmax(-1)
        p = teacher[learned].float().log_softmax(-1)
        best = p.argmax(-1)
        soft = (p.exp() * (p - scores)).sum(-1)
        hard = -scores.gather(-1, best[:, None])[:, 0]
        apart = F.smooth_l1_loss(predicted, wanted[learned], reduction="none").mean(-1)
        lost = apart + CROSS_ENTROPY * ((1 - HARD) * soft + HARD * hard)
        before = int(places[0])
        whole = F.pad(learned, (before, -(before + count) % size))
        whole = whole.view(len(learned), -1, size)
        far = torch.arange(size, device=rows.device).expand(whole.shape)[whole]
        return sums_of(lost, scores.argmax(-1) == best, far, whole)

    def _predicted(self, features: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """The predicted features [b, T, h].

        `ids` int64 [b, T] are the tokens behind the rows, `places` int64 [T] the rows'
        places in their blocks.
        """
        size, rows = self.drafter.config.slots, torch.arange(len(places))
        rows = rows.to(places.device)
        windows = F.pad(features, (0, 0, size - 1, 0)).unfold(1, size, 1)
        tokens = F.pad(ids, (size - 1, 0)).unfold(1, size, 1)
        ends = rows + size - 1 - places
        mask = torch.zeros(len(rows), len(rows), device=rows.device)
        mask = mask.masked_fill(rows > ends[:, None], -torch.inf)[None, None]
        predicted: Tensor = self.drafter(
            tokens, windows.transpose(-1, -2), rows[None], None, mask
        )
        return predicted


def told_rows(
    wrong: Tensor, places: Tensor, size: int, share: float, seed: int
) -> Tensor:
    """The rows bool [b, T] that read their own answers.

    They are `share` of the `wrong` rows of each sequence, bool [b, T], in blocks that
    are drawn: the first rows of such a block, and never its last.
    """
    count = len(places)
    blocks = (torch.arange(count, device=places.device) + places[0]) // size
    draw = torch.Generator().manual_seed(seed)
    shape = len(wrong), int(blocks[-1]) + 1
    order = torch.rand(shape, generator=draw).argsort(-1)
    lengths = torch.randint(1, size, shape, generator=draw)
    budget = share * wrong.sum(-1, keepdim=True).cpu()
    spent = lengths.gather(1, order).cumsum(-1)
    fits = torch.zeros(shape, dtype=torch.bool).scatter(1, order, spent <= budget)
    told = torch.where(fits, lengths, 0).to(wrong.device)[:, blocks]
    return places < told


class FalconTraining(LayerTraining):
    """Trains a Falcon drafter.

    FalconTraining("target", Path("drafter"), [Path("notes.txt")]).run(print)
    """

    product = "a Falcon drafter"
    family = "falcon"
    settings: FalconSettings

    def default_settings(self) -> FalconSettings:
        """Blocks of two, as the paper found best."""
        return FalconSettings()

    def new_config(self) -> HeadConfig:
        """A layer of the target's sizes, for blocks of some rows."""
        return replace(super().new_config(), slots=self.settings.block_rows)

    def new_drafter(self) -> Falcon:
        """A new drafter."""
        return Falcon(self.config, self.target.model)

    def new_objective(self, drafter: nn.Module) -> FalconObjective:
        """The drafter and its loss."""
        return FalconObjective(drafter)

    def lesson(self, accelerator: Any, batch: Batch) -> FalconLesson:
        """What the target says of a batch, and how much of it the drafter is told."""
        plain = super().lesson(accelerator, batch)
        share = GLANCED * (1 - self.step / self.steps)
        seed = 1_000_003 * self.options.seed + self.step
        return FalconLesson(**vars(plain), share=share, seed=seed)

    def own_fields(self) -> dict[str, Any]:
        """The name of the architecture, and the tokens of a pass."""
        return {"architectures": [ARCHITECTURE], "block_size": self.config.slots}
