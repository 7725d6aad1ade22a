"""jetdraft train exit: a head that stops a text, or leaves layers out."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.cli.command import Command, option
from jetdraft.cli.flags import integers
from jetdraft.train.exit.exit_training import ExitTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import run_training, training_options


@click.command("exit", cls=Command)
@click.argument("target")
@training_options("head", rate=2e-3)
@option(
    "training",
    "--exits",
    help="Train exits behind so many layers, for example 2,4; default: a quarter, a "
    "half and three quarters of the target's layers.",
)
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    exits: str | None,
) -> int:
    """Train a head that stops TARGET's text, or leaves its upper layers out."""
    chosen = () if exits is None else tuple(integers(exits, "--exits"))
    return run_training(
        lambda bars: ExitTraining(target, output, data, chosen, training, bars)
    )
