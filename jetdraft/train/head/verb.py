"""jetdraft train head: a drafter that reads the target's hidden states."""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.cli.command import Command, option
from jetdraft.cli.flags import PATH
from jetdraft.errors import OptionError
from jetdraft.train.head.head_training import KINDS, HeadSettings, HeadTraining
from jetdraft.train.training import TrainingOptions
from jetdraft.train.training_command import (
    half_option,
    inner_option,
    regenerate_option,
    run_training,
    training_options,
)


@click.command("head", cls=Command)
@click.argument("target")
@training_options("head")
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
@regenerate_option
@inner_option("an EAGLE head")
@half_option("head")
@option(
    "training",
    "--cache",
    type=PATH,
    help="Keep the target's states in this folder; default: compute them in each step.",
)
def command(
    target: str,
    data: list[Path],
    output: Path,
    training: TrainingOptions,
    kind: str,
    draft_vocabulary: int,
    taps: str | None,
    unrolled: int,
    regenerate: bool,
    inner: int,
    half: bool,
    cache: Path | None,
) -> int:
    """Train a head that drafts for TARGET, a checkpoint folder or hub id."""
    settings = HeadSettings(
        kind, draft_vocabulary, _numbers(taps), unrolled, regenerate, inner, half
    )
    return run_training(
        lambda bars: HeadTraining(target, output, data, settings, training, cache, bars)
    )


def _numbers(taps: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(tap) for tap in taps.split(",")) if taps else ()
    except ValueError as error:
        raise OptionError(
            f"the taps {taps!r} are no numbers; give layers like 2,12,21", "taps"
        ) from error
