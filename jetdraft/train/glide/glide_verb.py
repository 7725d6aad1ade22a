"""jetdraft train glide: a drafter that reads the target's keys and values."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.terminal.command import Command
from jetdraft.train.glide.glide_training import GlideSettings, GlideTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import (
    half_option,
    inner_option,
    regenerate_option,
    run_training,
    training_options,
)


@click.command("glide", cls=Command)
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
    """Train a layer that drafts for TARGET from its keys and values."""
    settings = GlideSettings(regenerate, half, inner)
    return run_training(
        lambda bars: GlideTraining(target, output, data, settings, training, bars)
    )
