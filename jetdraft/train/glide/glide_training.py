"""Trains a layer that reads the target's keys and values (GliDe, 2402.02082)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers, final_norm
from jetdraft.contracts.constants import HIDDEN
from jetdraft.errors import UnsupportedModelError
from jetdraft.methods.glide.module import ARCHITECTURE, Glide
from jetdraft.train.data import Batch
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.beginnings import take_norm
from jetdraft.train.taught.layer_training import LayerTraining
from jetdraft.train.taught.next_token_training import NextTokenObjective
from jetdraft.train.taught.precision import precision


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


class GlideTraining(LayerTraining):
    """Trains a GliDe drafter.

    GlideTraining("target", Path("drafter"), [Path("notes.txt")]).run(print)
    """

    product = "a GliDe drafter"
    family = "glide"

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
