"""jetdraft train: one command for each method that learns, and three beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jetdraft.cli.command import Command, LazyGroup, option
from jetdraft.cli.flags import PATH, output_option
from jetdraft.cli.progress import ProgressBars
from jetdraft.errors import JetdraftError
from jetdraft.runtime.planning.registry import load_object, methods

if TYPE_CHECKING:
    from jetdraft.train.task import Task, TrainingOptions
    from jetdraft.train.training import Progress, Training

INTERRUPTED = 130
"""The exit code after Ctrl-C."""

OTHERS = {
    "sec": ("a head that stops a text", "jetdraft.train.sec:SecTask"),
    "acceptance": (
        "when the drafter should stop, for stopping=learned",
        "jetdraft.train.acceptance:command",
    ),
    "use": (
        "the wrong drafts that serve --learn has kept",
        "jetdraft.train.use.background:command",
    ),
}
"""What belongs to no method of its own: a summary, and a task or a click command."""


class Trainers(LazyGroup):
    """What can be trained; only a task in use is imported, and torch with it."""

    @property
    def summaries(self) -> dict[str, str]:  # type: ignore[override]
        """A line for each method with a task, and for the others."""
        trained = {name: m.summary for name, m in methods().items() if m.task}
        return trained | {name: summary for name, (summary, _) in OTHERS.items()}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a task and make its command, or None for an unknown name."""
        if cmd_name not in self.summaries:
            return None
        name = OTHERS[cmd_name][1] if cmd_name in OTHERS else methods()[cmd_name].task
        try:
            found = load_object(name)
            is_command = isinstance(found, click.Command)
            made: click.Command = found if is_command else command_of(cmd_name, found)
        except ImportError as error:
            raise JetdraftError(
                f"training needs {error.name}; pip install 'jetdraft[cpu,train]'"
            ) from error
        return made


def command_of(name: str, task: type[Task]) -> click.Command:
    """The command that trains a task; its options are the fields of its settings."""
    from jetdraft.train.task import TrainingOptions, setting_flags

    alone = ", or prompts that the target completes" if task.completes_prompts else ""
    data_option = option(
        "training",
        "--data",
        multiple=True,
        required=True,
        type=PATH,
        help="A text file, or .jsonl with prompt and completion, text or messages"
        f"{alone}; may be given several times.",
    )

    @click.command(name, cls=Command, help=task.help)
    @click.argument("target")
    @data_option
    @setting_flags(TrainingOptions, "options", task.options)
    @output_option("Write to this folder, or resume the run in it.")
    @setting_flags(task.Settings)
    def command(
        target: str,
        data: tuple[Path, ...],
        output: Path,
        options: TrainingOptions,
        settings: Any,
    ) -> int:
        from jetdraft.train.training import Training

        return run_training(
            lambda bars: Training(
                task(settings), target, output, list(data), options, bars
            )
        )

    made: click.Command = command
    return made


def run_training(prepare: Callable[[ProgressBars], Training]) -> int:
    """Prepare a training and run it; gives the exit code.

    It says what is trained, moves a bar, and prints a line after each validation.
    Ctrl-C saves, and says how to go on.
    """
    from jetdraft.train.machine import this_process

    run: Training | None = None
    with ProgressBars() as bars:
        try:
            run = prepare(bars)
            bars.close()
            if this_process().is_main_process:
                click.echo(run.task.headline(run), err=True)
            run.run(partial(_show, bars, run))
        except KeyboardInterrupt:
            bars.close()
            place = "" if run is None else f" after step {run.step}"
            click.echo(
                f"stopped{place}; run the same command again to resume", err=True
            )
            return INTERRUPTED
    if this_process().is_main_process:
        line = f"{run.folder.path}: {run.task.product} of {run.step} steps"
        click.echo(line, err=True)
    return 0


def _show(bars: ProgressBars, run: Training, progress: Progress) -> None:
    """Move the bar, and print a line after a validation."""
    if progress.validation is not None:
        bars.close()
        line = run.task.summary_line(progress.validation)
        click.echo(f"step {progress.step}: {line}", err=True)
    bars("train", progress.step, progress.steps)


@click.group("train", cls=Trainers)
def command() -> None:
    """Train a model to draft."""
