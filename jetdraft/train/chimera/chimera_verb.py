"""jetdraft train chimera: a drafter of three tokens and the states of the target."""

from __future__ import annotations

from jetdraft.train.chimera.chimera_training import ChimeraTraining
from jetdraft.train.taught.layer_training import layer_command

command = layer_command(
    ChimeraTraining,
    "Train a layer that drafts for TARGET from three tokens and its states.",
)
