"""What the verbs of trainings share: their options, and how they run one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.command import Decorator, option, together
from jetdraft.cli.flags import PATH, output_option, training_seed_option
from jetdraft.cli.progress import ProgressBars
from jetdraft.train.processes import this_process
from jetdraft.train.training import Progress, Training, TrainingOptions

INTERRUPTED = 130
"""The exit code after Ctrl-C."""


regenerate_option = option(
    "training",
    "--regenerate",
    is_flag=True,
    help="Let the target complete the texts itself, and train on what it writes.",
)


def half_option(product: str) -> Decorator:
    """The option that stores what is trained in float16."""
    return option(
        "training", "--half", is_flag=True, help=f"Write the {product} in float16."
    )


def inner_option(product: str) -> Decorator:
    """The option of the width inside an MLP."""
    return option(
        "training",
        "--inner",
        default=0,
        help=f"Width inside the MLP of {product}; default: the target's.",
    )


def training_options(
    saved: str,
    steps: int | None = 200,
    needs_data: bool = True,
    rate: float = 5e-4,
    prompts_alone: bool = False,
) -> Decorator:
    """Give the command `data`, `output` and `training`, a `TrainingOptions`.

    `saved` is what a validation saves; `steps` of None lets the trainer advise; `rate`
    is the default of the learning rate; `prompts_alone` says that the target completes
    prompts.

        @training_options("head")
        def command(target, data, output, training): ...
    """
    flags = _flags(saved, steps, needs_data, rate, prompts_alone)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(data: tuple[Path, ...], output: Path, **options: Any) -> Any:
            own = {
                field.name: options.pop(field.name) for field in fields(TrainingOptions)
            }
            training = TrainingOptions(**own)
            return function(
                data=list(data), output=output, training=training, **options
            )

        return flags(command)

    return decorate


def _data_option(needs_data: bool, prompts_alone: bool) -> Decorator:
    alone = ", or prompts that the target completes" if prompts_alone else ""
    return option(
        "training",
        "--data",
        multiple=True,
        required=needs_data,
        type=PATH,
        help="A text file, or .jsonl with prompt and completion, text or messages"
        f"{alone}; may be given several times.",
    )


def _flags(
    saved: str, steps: int | None, needs_data: bool, rate: float, prompts_alone: bool
) -> Decorator:
    """The options that all trainings take."""
    advice = "; default: what the drafter's size asks for, at most 50 readings"
    advised = "" if steps else advice
    return together(
        _data_option(needs_data, prompts_alone),
        option(
            "training",
            "--steps",
            type=int,
            default=steps,
            show_default=steps is not None,
            help=f"Steps of training{advised}.",
        ),
        option(
            "training",
            "--batch-size",
            default=8,
            show_default=True,
            help="Sequences per step.",
        ),
        option(
            "training",
            "--sequence-length",
            default=256,
            show_default=True,
            help="Tokens per sequence.",
        ),
        option(
            "training",
            "--learning-rate",
            default=rate,
            show_default=True,
            help="Learning rate of the first step; it falls to zero.",
        ),
        option(
            "training",
            "--validation-share",
            default=0.05,
            show_default=True,
            help="Share of the sequences held out for validation.",
        ),
        option(
            "training",
            "--validate-every",
            default=50,
            show_default=True,
            help=f"Steps between validations; each saves the {saved}.",
        ),
        training_seed_option,
        output_option(f"Write the {saved} to this folder, or resume the run in it."),
    )


def run_training(prepare: Callable[[ProgressBars], Training]) -> int:
    """Prepare a training and run it; gives the exit code.

    It says what is trained, moves a bar, and prints a line after each validation.
    Ctrl-C saves, and says how to go on.

        run_training(lambda bars: StreamTraining(target, output, data))
    """
    run: Training | None = None
    with ProgressBars() as bars:
        try:
            run = prepare(bars)
            bars.close()
            if this_process().is_main_process:
                click.echo(run.summary(), err=True)
            run.run(partial(_show, bars, run))
        except KeyboardInterrupt:
            bars.close()
            place = "" if run is None else f" after step {run.step}"
            click.echo(
                f"stopped{place}; run the same command again to resume", err=True
            )
            return INTERRUPTED
    if this_process().is_main_process:
        click.echo(f"{run.folder.path}: {run.product} of {run.step} steps", err=True)
    return 0


def _show(bars: ProgressBars, run: Training, progress: Progress) -> None:
    """Move the bar, and print a line after a validation."""
    if progress.validation is not None:
        bars.close()
        told = run.told(progress.validation)
        click.echo(f"step {progress.step}: {told}", err=True)
    bars("train", progress.step, progress.steps)
