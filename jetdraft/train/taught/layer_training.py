"""What trainings of one layer with an MLP share: its width, its config, its command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.cli.command import Command
from jetdraft.errors import OptionError
from jetdraft.train.head.head_layout import config_of
from jetdraft.train.taught.next_token_training import (
    NextTokenSettings,
    NextTokenTraining,
)
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import (
    half_option,
    inner_option,
    regenerate_option,
    run_training,
    training_options,
)


@dataclass(frozen=True)
class LayerSettings(NextTokenSettings):
    """What drafter to train.

    Its MLP is `inner` wide inside; 0 is the target's width.

        LayerSettings(inner=256)
    """

    inner: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.inner <= 10**6:
            raise OptionError(f"inner {self.inner} is out of range; give 0 to 1000000")


class LayerTraining(NextTokenTraining):
    """Trains a drafter of one layer with the target's sizes; a subclass says which."""

    settings: LayerSettings
    family: str

    def default_settings(self) -> LayerSettings:
        """A drafter with the target's sizes."""
        return LayerSettings()

    def new_config(self) -> HeadConfig:
        """A layer of the target's sizes."""
        config = config_of(self.target)
        inner = self.settings.inner or config.intermediate_size
        return replace(config, intermediate_size=inner)


def layer_command(kind: type[LayerTraining], says: str) -> click.Command:
    """The command that runs a kind of training, named after its family.

    command = layer_command(GlideTraining, "Train a layer that drafts for TARGET.")
    """

    @click.command(kind.family, cls=Command, help=says)
    @click.argument("target")
    @training_options("drafter")
    @inner_option("the drafter")
    @regenerate_option
    @half_option("drafter")
    def command(
        target: str,
        data: list[Path],
        output: Path,
        training: TrainingOptions,
        inner: int,
        regenerate: bool,
        half: bool,
    ) -> int:
        settings = LayerSettings(regenerate, half, inner)
        return run_training(
            lambda bars: kind(target, output, data, settings, training, bars)
        )

    made: click.Command = command
    return made
