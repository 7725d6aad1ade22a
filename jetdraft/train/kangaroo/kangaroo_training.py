"""Trains an adapter behind the lower layers of a target (Kangaroo, 2404.18911)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.layers import decoder_layers, final_norm
from jetdraft.errors import OptionError
from jetdraft.methods.kangaroo.module import ARCHITECTURE, Kangaroo
from jetdraft.train.head.head_layout import config_of
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.beginnings import take_norm, take_weights
from jetdraft.train.taught.next_token_training import (
    NextTokenObjective,
    NextTokenSettings,
    NextTokenTraining,
)

SHARE = 0.07
"""The share of the layers below the exit by default; the paper has 2 of 32, 3 of 40."""

FEWEST = 2
"""The fewest layers below the exit by default."""


@dataclass(frozen=True)
class KangarooSettings(NextTokenSettings):
    """What adapter to train.

    The lower half of the target has `exit_layer` layers; 0 is the default.

        KangarooSettings(exit_layer=2)
    """

    exit_layer: int = 0


class KangarooObjective(NextTokenObjective):
    """An adapter and its loss; all rows see the states of all rows before them."""

    def hidden(self, lesson: Lesson, starts: Tensor) -> Tensor:
        """The states for the LM head, [b, T, h]."""
        (states,) = lesson.taps
        positions = torch.arange(states.shape[1], device=states.device)
        hidden: Tensor = self.drafter(states, positions[None])
        return hidden


class KangarooTraining(NextTokenTraining):
    """Trains a Kangaroo adapter.

    KangarooTraining("target", Path("adapter"), [Path("notes.txt")]).run(print)
    """

    product = "a Kangaroo adapter"
    settings: KangarooSettings

    def default_settings(self) -> KangarooSettings:
        """The default exit."""
        return KangarooSettings()

    def new_config(self) -> HeadConfig:
        """Attention of the target's sizes, behind the layer that the settings say."""
        layers = len(decoder_layers(self.target.model))
        advised = min(max(FEWEST, round(SHARE * layers)), layers - 1)
        layer = self.settings.exit_layer or advised
        if not 1 <= layer < layers:
            raise OptionError(
                f"exit layer {layer} does not cut {layers} layers in two; give 1 to "
                f"{layers - 1}",
                "exit_layer",
            )
        return replace(config_of(self.target), taps=(layer,))

    def new_drafter(self) -> Kangaroo:
        """An adapter that begins as the attention of the next layer, without its MLP.

        Its last norm begins as the target's, where it is of the same kind.
        """
        model = self.target.model
        adapter = Kangaroo(self.config, model)
        take_weights(adapter.layer, decoder_layers(model)[adapter.exit_layer])
        take_norm(adapter.norm, final_norm(model), self.config.hidden_size)
        return adapter

    def new_objective(self, drafter: nn.Module) -> KangarooObjective:
        """The adapter and its loss."""
        return KangarooObjective(drafter)

    def own_fields(self) -> dict[str, Any]:
        """The name of the architecture, and the layers of the lower half."""
        return {"architectures": [ARCHITECTURE], "exit_layer": self.config.taps[0]}
