"""jetdraft train forecast: prompt tokens that see a learned prefix in each layer."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.checkpoints.prompts import FORECAST, PromptSettings
from jetdraft.cli.command import Command, option
from jetdraft.train.ppd.prompt_training import Lessons, PromptTraining, lesson_options
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import run_training, training_options


@click.command("forecast", cls=Command)
@click.argument("target")
@training_options("checkpoint", rate=1e-2)
@option(
    "training",
    "--gamma",
    default=4,
    show_default=True,
    help="Forecasts behind a row; each guesses one token further.",
)
@option(
    "training",
    "--prefix",
    default=16,
    show_default=True,
    help="Rows of the learned prefix, which forecasts alone see.",
)
@lesson_options
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    lessons: Lessons,
    gamma: int,
    prefix: int,
) -> int:
    """Add forecasts to TARGET, a checkpoint folder or hub id."""
    settings = PromptSettings(gamma, prefix=prefix, mode=FORECAST)
    return run_training(
        lambda bars: PromptTraining(
            target, output, data, settings, lessons, training, bars
        )
    )
