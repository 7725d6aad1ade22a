"""jetdraft train streams: add speculative streams to a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.checkpoints.streams import StreamSettings
from jetdraft.cli.command import Command, option
from jetdraft.train.stream_training import StreamTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import run_training, training_options


@click.command("streams", cls=Command)
@click.argument("target")
@training_options("checkpoint")
@option(
    "training",
    "--mode",
    default="lossless",
    show_default=True,
    help="lossless keeps the target as it is; shared trains it too. On free text "
    "jetdraft train forecast, which keeps it too, guessed better in the same time.",
)
@option("training", "--gamma", default=4, show_default=True, help="Streams per row.")
@option(
    "training",
    "--layers",
    default=2,
    show_default=True,
    help="Top layers that have streams.",
)
@option(
    "training",
    "--lora-rank",
    default=32,
    show_default=True,
    help="Rank of the LoRA adapters.",
)
@option(
    "training",
    "--prune-rank",
    default=8,
    show_default=True,
    help="Rank of the early exit that prunes drafts.",
)
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    mode: str,
    gamma: int,
    layers: int,
    lora_rank: int,
    prune_rank: int,
) -> int:
    """Add speculative streams to TARGET, a checkpoint folder or hub id."""
    settings = StreamSettings(gamma, layers, mode, lora_rank, prune_rank)
    return run_training(
        lambda bars: StreamTraining(target, output, data, settings, training)
    )
