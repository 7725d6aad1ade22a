"""jetdraft train streams: add speculative streams to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jetdraft.checkpoints.streamed import StreamSettings
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.flags import PATH, output_option, training_seed_option
from jetdraft.terminal.progress import ProgressBars
from jetdraft.train.stream_training import StreamTraining
from jetdraft.train.training import Progress, TrainingOptions


@click.command("streams", cls=Command)
@click.argument("target")
@option(
    "training",
    "--data",
    multiple=True,
    required=True,
    type=PATH,
    help="A text file, or .jsonl with prompt and completion; may be given several "
    "times.",
)
@option(
    "training",
    "--mode",
    default="lossless",
    show_default=True,
    help="lossless keeps the target as it is; shared trains it too.",
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
@option(
    "training", "--steps", default=200, show_default=True, help="Steps of training."
)
@option(
    "training", "--batch-size", default=8, show_default=True, help="Sequences per step."
)
@option(
    "training",
    "--sequence-length",
    default=256,
    show_default=True,
    help="Tokens per sequence.",
)
@option(
    "training",
    "--learning-rate",
    default=5e-4,
    show_default=True,
    help="Learning rate of the first step; it falls to zero.",
)
@option(
    "training",
    "--validation-share",
    default=0.05,
    show_default=True,
    help="Share of the sequences held out for validation.",
)
@option(
    "training",
    "--validate-every",
    default=50,
    show_default=True,
    help="Steps between validations; each saves the checkpoint.",
)
@training_seed_option
@output_option("Write the checkpoint to this folder, or resume the run in it.")
def command(
    target: str,
    data: tuple[Path, ...],
    output: Path,
    mode: str,
    gamma: int,
    layers: int,
    lora_rank: int,
    prune_rank: int,
    **options: Any,
) -> int:
    """Add speculative streams to TARGET, a checkpoint folder or hub id."""
    settings = StreamSettings(gamma, layers, mode, lora_rank, prune_rank)
    run = StreamTraining(
        target, output, list(data), settings, TrainingOptions(**options)
    )
    counts = run.parameters
    click.echo(
        f"training {counts['streams']} weights of the streams and {counts['lora']} of "
        f"LoRA on {len(run.corpus.training)} sequences",
        err=True,
    )
    with ProgressBars() as bars:
        try:
            run.run(lambda progress: _show(bars, progress))
        except KeyboardInterrupt:
            bars.close()
            click.echo(
                f"stopped after step {run.step}; run the same command again to resume",
                err=True,
            )
            return 130
    click.echo(f"{output}: streams of {run.step} steps", err=True)
    return 0


def _show(bars: ProgressBars, progress: Progress) -> None:
    """Move the bar, and print a line after a validation."""
    figures = progress.validation
    if figures is not None:
        bars.close()
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        stream_losses = " ".join(f"{loss:.2f}" for loss in figures["stream_losses"])
        click.echo(
            f"step {progress.step}: validation loss {figures['main_loss']:.2f}, "
            f"streams {stream_losses}, predicted acceptance {rates}",
            err=True,
        )
    bars("train", progress.step, progress.steps)
