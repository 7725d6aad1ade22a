"""jetdraft train head: a drafter that reads the target's hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jetdraft.errors import OptionError
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.flags import PATH, output_option, training_seed_option
from jetdraft.terminal.progress import ProgressBars
from jetdraft.train.head.head_training import KINDS, HeadSettings, HeadTraining
from jetdraft.train.training import Progress, TrainingOptions


@click.command("head", cls=Command)
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
    "--kind",
    default="eagle3",
    show_default=True,
    help=f"The kind of head: {', '.join(KINDS)}.",
)
@option(
    "drafting",
    "--draft-vocab",
    "draft_vocabulary",
    default=32000,
    show_default=True,
    help="Tokens that EAGLE-3 can draft, the most frequent in the data.",
)
@option(
    "training",
    "--taps",
    help="Layers whose inputs EAGLE-3 reads, for example 2,12,21; default: 2, the "
    "middle and the last but two.",
)
@option(
    "training",
    "--unrolled",
    default=7,
    show_default=True,
    help="Steps of a draft that are trained, or the tokens that Medusa guesses.",
)
@option(
    "training",
    "--regenerate",
    is_flag=True,
    help="Let the target complete the texts itself, and train on what it writes.",
)
@option(
    "training",
    "--inner",
    default=0,
    help="Width inside the MLP of an EAGLE head; default: the target's.",
)
@option("training", "--half", is_flag=True, help="Write the head in float16.")
@option(
    "training",
    "--cache",
    type=PATH,
    help="Keep the target's states in this folder; default: compute them in each step.",
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
    help="Steps between validations; each saves the head.",
)
@training_seed_option
@output_option("Write the head to this folder, or resume the run in it.")
def command(
    target: str,
    data: tuple[Path, ...],
    output: Path,
    kind: str,
    draft_vocabulary: int,
    taps: str | None,
    unrolled: int,
    regenerate: bool,
    inner: int,
    half: bool,
    cache: Path | None,
    **options: Any,
) -> int:
    """Train a head that drafts for TARGET, a checkpoint folder or hub id."""
    settings = HeadSettings(
        kind, draft_vocabulary, _numbers(taps), unrolled, regenerate, inner, half
    )
    training = TrainingOptions(**options)
    with ProgressBars() as bars:
        run = HeadTraining(target, output, list(data), settings, training, cache, bars)
        bars.close()
        vocabulary = run.config.draft_vocab_size
        click.echo(
            f"training {run.parameters} weights of an {kind} head over {vocabulary} "
            f"tokens on {len(run.corpus.training)} sequences",
            err=True,
        )
        try:
            run.run(lambda progress: _show(bars, progress))
        except KeyboardInterrupt:
            bars.close()
            click.echo(
                f"stopped after step {run.step}; run the same command again to resume",
                err=True,
            )
            return 130
    click.echo(f"{output}: a head of {run.step} steps", err=True)
    return 0


def _numbers(taps: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(tap) for tap in taps.split(",")) if taps else ()
    except ValueError as error:
        raise OptionError(
            f"the taps {taps!r} are no numbers; give layers like 2,12,21", "taps"
        ) from error


def _show(bars: ProgressBars, progress: Progress) -> None:
    """Move the bar, and print a line after a validation."""
    figures = progress.validation
    if figures is not None:
        bars.close()
        rates = " ".join(f"{share:.2f}" for share in figures["acceptance"])
        click.echo(
            f"step {progress.step}: validation loss {figures['losses'][0]:.2f}, "
            f"right by place {rates}",
            err=True,
        )
    bars("train", progress.step, progress.steps)
