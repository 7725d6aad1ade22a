"""jetdraft train ppd: prompt tokens, with which a target drafts for itself."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.checkpoints.prompts import PromptSettings
from jetdraft.cli.command import Command, option
from jetdraft.train.ppd.prompt_training import Lessons, PromptTraining, lesson_options
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import run_training, training_options


@click.command("ppd", cls=Command)
@click.argument("target")
@training_options("checkpoint", rate=1e-2)
@option(
    "training",
    "--prompt-tokens",
    default=3,
    show_default=True,
    help="Prompt tokens behind a row; each guesses one token further.",
)
@option(
    "training",
    "--ensemble",
    default=1,
    show_default=True,
    help="Embeddings of each prompt token, whose guesses are averaged.",
)
@lesson_options
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    lessons: Lessons,
    prompt_tokens: int,
    ensemble: int,
) -> int:
    """Add prompt tokens to TARGET, a checkpoint folder or hub id."""
    settings = PromptSettings(prompt_tokens, ensemble)
    return run_training(
        lambda bars: PromptTraining(
            target, output, data, settings, lessons, training, bars
        )
    )
