"""How a Falcon drafter is trained: coupled glancing distillation (2412.12639).

Where its tokens are wrong, the first rows of some blocks read what they should predict.
The loss is of a second prediction in the other rows, for target p and drafter q:

    SmoothL1(features) + 0.1 (0.9 KL(p || q) + 0.1 CE(argmax p; q))
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.methods.falcon.module import MAX_ROWS, Falcon
from jetdraft.options import setting
from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.heads import LayerSettings, LayerTask, sums_by_place
from jetdraft.train.task import Run, Sums
from jetdraft.train.teacher import Lesson, shift_rows

GLANCED_SHARE = 0.4  # Of the wrong tokens in the first step; it falls to zero.
CROSS_ENTROPY, NOISE_WIDTH = 0.1, 0.2
CHOICE_SHARE = 0.1  # The share of the target's choice in the loss of the tokens.


@dataclass(frozen=True)
class FalconSettings(LayerSettings):
    block_rows: int = setting(
        2, "Tokens that the drafter drafts in a pass.", (2, MAX_ROWS)
    )


@dataclass(frozen=True)
class FalconLesson(Lesson):
    """A lesson in which a `share` of the wrong rows is shown, drawn with a `seed`."""

    share: float
    seed: int


class FalconTask(LayerTask):
    """Trains a head that drafts several tokens in a pass; `first` begins a block."""

    Settings = FalconSettings
    help = "Train a head that drafts several tokens for TARGET in a pass."
    product = "a Falcon drafter"
    drafter_class = Falcon

    def new_config(self, target: Checkpoint) -> HeadConfig:
        return replace(super().new_config(target), slots=self.settings.block_rows)

    def target_lesson(self, run: Run, batch: Batch) -> FalconLesson:
        """Return the lesson of a batch, with the share of wrong rows to show."""
        share = GLANCED_SHARE * (1 - run.step / run.steps)
        plain = vars(super().target_lesson(run, batch))
        return FalconLesson(**plain, share=share, seed=run.seed_of_step)

    def sums(
        self, drafter: Falcon, lesson: FalconLesson, first: int, learns: bool
    ) -> Sums:
        """Return the sums by the place in a block; rows that are shown do not count."""
        size, count = drafter.config.slots, lesson.ids.shape[1]
        places = (torch.arange(count, device=lesson.ids.device) - first) % size
        (features,), ids = lesson.taps, shift_rows(lesson.ids, 1)
        if learns:
            draw = torch.Generator().manual_seed(lesson.seed)
            noise = torch.rand(features.shape, generator=draw).to(features)
            features = features + (noise - 0.5) * NOISE_WIDTH
        wanted = shift_rows(lesson.final, size)
        teacher = shift_rows(lesson.logits, size)
        learned = shift_rows(lesson.labels, size + 1, IGNORED) != IGNORED
        if learns and lesson.share:
            with torch.no_grad():
                guessed = predict_features(drafter, features, ids, places)[learned]
                chosen = drafter.lm_head(guessed).argmax(-1)
            wrong = torch.zeros_like(learned)
            wrong[learned] = chosen != teacher[learned].argmax(-1)
            shown = shown_rows(wrong, places, size, lesson.share, lesson.seed) & learned
            features = torch.where(shown[..., None], wanted, features)
            ids = torch.where(shown, shift_rows(lesson.ids, size + 1), ids)
            learned = learned & ~shown
        states = predict_features(drafter, features, ids, places)[learned]
        scores = drafter.lm_head(states).float().log_softmax(-1)
        p = teacher[learned].float().log_softmax(-1)
        best = p.argmax(-1)
        soft = (p.exp() * (p - scores)).sum(-1)
        hard = -scores.gather(-1, best[:, None])[:, 0]
        apart = F.smooth_l1_loss(states, wanted[learned], reduction="none").mean(-1)
        tokens = (1 - CHOICE_SHARE) * soft + CHOICE_SHARE * hard
        losses, right = apart + CROSS_ENTROPY * tokens, scores.argmax(-1) == best
        return sums_by_place(losses, right, learned, int(places[0]), size)

    def own_fields(self) -> dict[str, Any]:
        return {**super().own_fields(), "block_size": self.config.slots}


def predict_features(
    drafter: Falcon, features: Tensor, ids: Tensor, places: Tensor
) -> Tensor:
    """Predict features [b, T, h]; next `ids` int64 [b, T], block `places` int64 [T]."""
    size, rows = drafter.config.slots, torch.arange(len(places))
    rows = rows.to(places.device)
    windows = F.pad(features, (0, 0, size - 1, 0)).unfold(1, size, 1)
    tokens = F.pad(ids, (size - 1, 0)).unfold(1, size, 1)
    ends = rows + size - 1 - places
    mask = torch.zeros(len(rows), len(rows), device=rows.device)
    mask = mask.masked_fill(rows > ends[:, None], -torch.inf)[None, None]
    states: Tensor = drafter(tokens, windows.transpose(-1, -2), rows[None], None, mask)
    return states


def shown_rows(
    wrong: Tensor, places: Tensor, size: int, share: float, seed: int
) -> Tensor:
    """Choose the rows, bool [b, T], that read what they should predict.

    They begin random blocks; no block's last row is shown. They are at most `share`
    times as many as the `wrong` rows, bool [b, T], of a sequence.
    """
    blocks = (torch.arange(len(places), device=places.device) + places[0]) // size
    draw = torch.Generator().manual_seed(seed)
    shape = len(wrong), int(blocks[-1]) + 1
    order = torch.rand(shape, generator=draw).argsort(-1)
    lengths = torch.randint(1, size, shape, generator=draw)
    budget = share * wrong.sum(-1, keepdim=True).cpu()
    spent = lengths.gather(1, order).cumsum(-1)
    fits = torch.zeros(shape, dtype=torch.bool).scatter(1, order, spent <= budget)
    return places < torch.where(fits, lengths, 0).to(wrong.device)[:, blocks]
