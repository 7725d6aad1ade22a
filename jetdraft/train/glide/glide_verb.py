"""jetdraft train glide: a drafter that reads the target's keys and values."""

from __future__ import annotations

from jetdraft.train.glide.glide_training import GlideTraining
from jetdraft.train.taught.layer_training import layer_command

command = layer_command(
    GlideTraining, "Train a layer that drafts for TARGET from its keys and values."
)
