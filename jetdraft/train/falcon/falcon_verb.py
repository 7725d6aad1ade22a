"""jetdraft train falcon: a head that drafts several tokens in a pass."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.cli.command import Command, option
from jetdraft.train.falcon.falcon_training import FalconSettings, FalconTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import (
    half_option,
    inner_option,
    regenerate_option,
    run_training,
    training_options,
)


@click.command("falcon", cls=Command)
@click.argument("target")
@training_options("drafter")
@option(
    "training",
    "--block-rows",
    default=FalconSettings.block_rows,
    show_default=True,
    help="Tokens that the drafter drafts in a pass.",
)
@inner_option("the drafter")
@regenerate_option
@half_option("drafter")
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    block_rows: int,
    inner: int,
    regenerate: bool,
    half: bool,
) -> int:
    """Train a head that drafts several tokens for TARGET in a pass."""
    settings = FalconSettings(regenerate, half, inner, block_rows)
    return run_training(
        lambda bars: FalconTraining(target, output, data, settings, training, bars)
    )
