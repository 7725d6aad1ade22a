"""How a Kangaroo adapter is trained: `jetdraft train kangaroo`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import OptionError
from jetdraft.methods.kangaroo.module import Kangaroo
from jetdraft.options import setting
from jetdraft.train.heads import NextTokenTask, copy_weights, make_config
from jetdraft.train.task import DrafterSettings, Run
from jetdraft.train.teacher import Lesson

SHARE, FEWEST_LAYERS = 0.07, 2  # Of all layers; the paper: 2 of 32, 3 of 40.


@dataclass(frozen=True)
class KangarooSettings(DrafterSettings):
    exit_layer: int = setting(
        0, "Layers of the target that draft.", unset="7 % of them, and at least 2"
    )


class KangarooTask(NextTokenTask):
    """Trains an adapter after the lower layers; a row sees the states up to its own."""

    Settings = KangarooSettings
    help = "Train an adapter that lets the lower layers of TARGET draft for it."
    product = "a Kangaroo adapter"
    drafter_class = Kangaroo

    def new_config(self, target: Checkpoint) -> HeadConfig:
        """Make the config of an adapter after `exit_layer`, or the advised layer."""
        layers = len(decoder_layers(target.model))
        advised = min(max(FEWEST_LAYERS, round(SHARE * layers)), layers - 1)
        layer = self.settings.exit_layer or advised
        if not 1 <= layer < layers:
            fact = f"exit layer {layer} does not cut {layers} layers in two"
            raise OptionError(f"{fact}; give 1 to {layers - 1}", "exit_layer")
        return make_config(target, HeadConfig, taps=(layer,))

    def new_drafter(self, run: Run) -> Kangaroo:
        """Make an adapter that begins as the attention of the target's next layer."""
        adapter: Kangaroo = super().new_drafter(run)
        layers = decoder_layers(run.target.model)
        copy_weights(adapter.first_layer, layers[adapter.exit_layer])
        return adapter

    def hidden(self, drafter: Kangaroo, lesson: Lesson, starts: Tensor) -> Tensor:
        """Return all rows' states for the LM head, [b, T, h]; ignores `starts`."""
        (states,) = lesson.taps
        positions = torch.arange(states.shape[1], device=states.device)
        hidden: Tensor = drafter(states, positions[None])
        return hidden

    def own_fields(self) -> dict[str, Any]:
        return {**super().own_fields(), "exit_layer": self.config.taps[0]}
