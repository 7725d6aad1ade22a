"""jetdraft train kangaroo: an adapter that drafts behind the target's lower layers."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.cli.command import Command, option
from jetdraft.train.kangaroo.kangaroo_training import KangarooSettings, KangarooTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import (
    half_option,
    regenerate_option,
    run_training,
    training_options,
)


@click.command("kangaroo", cls=Command)
@click.argument("target")
@training_options("adapter")
@option(
    "training",
    "--exit-layer",
    default=0,
    help="Layers of the target that draft; default: 7 % of them, and at least 2.",
)
@regenerate_option
@half_option("adapter")
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    exit_layer: int,
    regenerate: bool,
    half: bool,
) -> int:
    """Train an adapter that lets the lower layers of TARGET draft for it."""
    settings = KangarooSettings(regenerate, half, exit_layer)
    return run_training(
        lambda bars: KangarooTraining(target, output, data, settings, training, bars)
    )
