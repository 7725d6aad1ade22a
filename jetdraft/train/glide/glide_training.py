"""Trains a layer that reads the target's keys and values (GliDe, 2402.02082)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.heads.attached.glide import ARCHITECTURE, Glide
from jetdraft.checkpoints.heads.head_config import GLIDE, HeadConfig
from jetdraft.checkpoints.streamed import decoder_layers, final_norm
from jetdraft.contract import HIDDEN
from jetdraft.errors import OptionError, UnsupportedModelError
from jetdraft.train.data import Batch
from jetdraft.train.head.head_layout import config_of
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.beginnings import take_norm
from jetdraft.train.taught.next_token_training import (
    NextTokenObjective,
    NextTokenSettings,
    NextTokenTraining,
)
from jetdraft.train.taught.precision import precision


@dataclass(frozen=True)
class GlideSettings(NextTokenSettings):
    """What drafter to train.

    Its MLP is `inner` wide inside; 0 is the target's width.

        GlideSettings(inner=256)
    """

    inner: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.inner <= 10**6:
            raise OptionError(f"inner {self.inner} is out of range; give 0 to 1000000")


@dataclass(frozen=True)
class GlideLesson(Lesson):
    """A lesson with the target's `keys` and `values` [b, kv_heads, T, d], rotated."""

    keys: Tensor
    values: Tensor


class GlideObjective(NextTokenObjective):
    """A drafter and its loss; a row reads the target up to the row before its draft."""

    def hidden(self, lesson: GlideLesson, starts: Tensor) -> Tensor:
        """The states for the LM head, [b, T, h]."""
        rows = torch.arange(len(starts), device=starts.device)
        bias = torch.where(rows >= starts[:, None], HIDDEN, 0.0)
        hidden: Tensor = self.drafter(
            lesson.ids, rows[None], lesson.keys, lesson.values, bias[None, None]
        )
        return hidden


class GlideTraining(NextTokenTraining):
    """Trains a GliDe drafter.

    GlideTraining("target", Path("drafter"), [Path("notes.txt")]).run(print)
    """

    product = "a GliDe drafter"
    settings: GlideSettings

    def default_settings(self) -> GlideSettings:
        """A drafter with the target's sizes."""
        return GlideSettings()

    def new_config(self) -> HeadConfig:
        """A layer of the target's sizes."""
        config = config_of(self.target)
        inner = self.settings.inner or config.intermediate_size
        return replace(config, family=GLIDE, intermediate_size=inner)

    def new_drafter(self) -> Glide:
        """A new layer; its last norm begins as the target's."""
        model = self.target.model
        drafter = Glide(self.config, model)
        take_norm(drafter.norm, final_norm(model), self.config.hidden_size)
        return drafter

    def new_objective(self, drafter: nn.Module) -> GlideObjective:
        """The drafter and its loss."""
        return GlideObjective(drafter)

    def lesson(self, accelerator: Any, batch: Batch) -> GlideLesson:
        """The target's keys and values of its last layer, and what it says."""
        model = self.target.model.to(accelerator.device)
        with torch.no_grad(), precision(batch.ids.device):
            outputs = model(input_ids=batch.ids, use_cache=True)
        last = outputs.past_key_values.layers[len(decoder_layers(model)) - 1]
        if last.keys.shape[2] != batch.ids.shape[1]:
            raise UnsupportedModelError(
                f"{self.target.source} attends in sliding windows, and GliDe reads all "
                "rows of its last layer; train another drafter"
            )
        known = torch.ones_like(batch.ids, dtype=torch.bool)
        return GlideLesson(
            ids=batch.ids,
            labels=batch.labels,
            taps=[],
            final=last.keys,
            logits=outputs.logits,
            known=known,
            keys=last.keys,
            values=last.values,
        )

    def own_fields(self) -> dict[str, Any]:
        """The name of the architecture."""
        return {"architectures": [ARCHITECTURE]}
