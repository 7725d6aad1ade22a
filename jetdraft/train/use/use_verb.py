"""jetdraft train drafter --from-use: a bundle's drafter learns from its use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from jetdraft.bundle import Bundle
from jetdraft.cli.command import Command, option, together
from jetdraft.cli.flags import PATH, bundle_argument, training_seed_option
from jetdraft.cli.progress import ProgressBars
from jetdraft.errors import StoreError
from jetdraft.files import is_free
from jetdraft.learning.weight_sets import is_learned, label
from jetdraft.train.use.background import Background
from jetdraft.train.use.head_student import student_of
from jetdraft.train.use.pace import Pace, stand_back
from jetdraft.train.use.use_training import Learned, UseOptions, UseTraining

_numbers = together(
    *(
        option(
            "training",
            flag,
            type=type(default),
            default=default,
            show_default=True,
            help=text,
        )
        for flag, default, text in (
            ("--steps", UseOptions.steps, "Steps of a training."),
            ("--batch-size", UseOptions.batch_size, "Texts per step."),
            (
                "--learning-rate",
                UseOptions.learning_rate,
                "Learning rate of the first step; it falls to zero.",
            ),
            ("--lora-rank", UseOptions.lora_rank, "Rank of the LoRA adapters."),
            ("--least", UseOptions.least, "Fewest wrong places to learn from."),
        )
    )
)


@click.command("drafter", cls=Command)
@bundle_argument
@option(
    "training",
    "--from-use",
    "folder",
    metavar="DIR",
    type=PATH,
    required=True,
    help="The folder that serve --learn or load(learn=) fills.",
)
@option(
    "training",
    "--from",
    "source",
    metavar="CHECKPOINT",
    default="",
    help="The drafter's checkpoint in floats; default: where the export read it.",
)
@option(
    "training",
    "--target",
    metavar="CHECKPOINT",
    default="",
    help="The target's checkpoint, whose states a head reads; default: where the "
    "export read it.",
)
@_numbers
@training_seed_option
@option(
    "training",
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    help="The most seconds of training, without waiting; default: no limit.",
)
@option(
    "training",
    "--watts",
    type=click.FloatRange(0, min_open=True),
    help="Wait while the module draws more; a Jetson tells.",
)
@option(
    "training",
    "--background",
    is_flag=True,
    help="At idle priority, and again whenever there is enough to learn from, until "
    "the seconds are spent.",
)
def command(
    bundle: Path,
    folder: Path,
    source: str,
    target: str,
    seconds: float | None,
    watts: float | None,
    background: bool,
    **options: Any,
) -> None:
    """Train BUNDLE's drafter on the places where its drafts were wrong.

    A model that runs with the same DIR takes the weights between two texts, and takes
    them back if fewer of their tokens are accepted.
    """
    pace, settings = Pace(seconds, watts), UseOptions(**options)
    if not is_learned(folder) and not (background and is_free(folder)):
        raise StoreError(
            f"no lessons are kept in {folder}; give the folder of serve --learn"
        )
    if background:
        stand_back()
    student = student_of(Bundle.open(bundle), source, target)
    training = UseTraining(student, folder, settings)
    if background:
        Background(training, pace, _say_waiting).run(_tell)
        return
    choice = training.sets.choice()
    if choice.before is not None:
        trial = f"{label(choice.name)} is still on trial"
        click.echo(f"{trial}; what is learned now will replace it", err=True)
    with ProgressBars() as bars:
        learned = training.run(pace, bars)
    _tell(learned)


def _say_waiting(reason: str) -> None:
    click.echo(f"waiting: {reason}", err=True)


def _tell(learned: Learned) -> None:
    before, after = learned.before, learned.after
    if learned.name is not None:
        outcome = f"the weights {learned.name[:12]} are on trial"
    elif after.loss < before.loss:
        outcome = "the lessons were erased meanwhile, so nothing was published"
    else:
        outcome = "nothing was learned, and nothing was published"
    click.echo(
        f"{learned.steps} steps on {learned.places} wrong places: held-out loss "
        f"{before.loss:.2f} to {after.loss:.2f}, right {before.right:.2f} to "
        f"{after.right:.2f}; {outcome}",
        err=True,
    )
