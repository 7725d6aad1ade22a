"""The commands that train; torch is imported with this module."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from jetdraft.bundle import Bundle
from jetdraft.cli import flags
from jetdraft.cli.command import Command, keyword_flags, option, record_flags
from jetdraft.cli.console import ProgressBars, read_prompts
from jetdraft.errors import StoreError
from jetdraft.files import is_free
from jetdraft.learning.lessons import has_learned, label
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.train import learning
from jetdraft.train.acceptance import fit_head, record_verdicts, save_head
from jetdraft.train.machine import this_process
from jetdraft.train.students import load_student
from jetdraft.train.task import Task, TrainingOptions
from jetdraft.train.training import Progress, Training

INTERRUPTED = 130  # The exit code after Ctrl-C.


def make_command(name: str, task: type[Task]) -> click.Command:
    """Make the command that trains a task, with flags for its settings."""
    alone = ", or prompts that the target completes" if task.completes_prompts else ""

    @click.command(name, cls=Command, help=task.help)
    @click.argument("target")
    @option(
        "training --data",
        "A text file, or .jsonl with prompt and completion, text or messages"
        f"{alone}; may be given several times.",
        multiple=True,
        required=True,
        type=flags.PATH,
    )
    @record_flags("options", TrainingOptions, **asdict(task.options))
    @flags.output_option("Write to this folder, or resume the run in it.")
    @record_flags("settings", task.Settings)
    def command(
        target: str,
        data: tuple[Path, ...],
        output: Path,
        options: TrainingOptions,
        settings: Any,
    ) -> int:
        return run_training(task(settings), target, output, list(data), options)

    made: click.Command = command
    return made


def run_training(
    task: Task, target: str, output: Path, data: list[Path], options: TrainingOptions
) -> int:
    """Run a training and return the exit code; Ctrl-C saves the run in `output`."""
    run: Training | None = None
    with ProgressBars() as bars:
        try:
            run = Training(task, target, output, data, options, bars)
            bars.close()
            if this_process().is_main_process:
                click.echo(task.headline(run), err=True)
            run.run(partial(_print_progress, bars, run))
        except KeyboardInterrupt:
            bars.close()
            place = "" if run is None else f" after step {run.step}"
            message = f"stopped{place}; run the same command again to resume"
            click.echo(message, err=True)
            return INTERRUPTED
    if this_process().is_main_process:
        click.echo(f"{output}: {task.product} of {run.step} steps", err=True)
    return 0


def _print_progress(bars: ProgressBars, run: Training, progress: Progress) -> None:
    if progress.validation is not None:
        bars.close()
        line = run.task.summary_line(progress.validation)
        click.echo(f"step {progress.step}: {line}", err=True)
    bars("train", progress.step, progress.steps)


@click.command("acceptance", cls=Command)
@flags.bundle_argument
@flags.prompts_option
@flags.generate_options("max_new_tokens", "temperature", max_new_tokens=128)
@keyword_flags(TrainingOptions, only=("seed",))
@record_flags("runtime", LoadOptions, only=("threads", "adapter"))
def acceptance(
    bundle: Path,
    prompts_file: Path | None,
    options: GenerateOptions,
    seed: int,
    runtime: LoadOptions,
) -> None:
    """Watch BUNDLE's drafter, and learn when it should stop (stopping=learned)."""
    model = load(bundle, **runtime)
    prompts = read_prompts(prompts_file, model)
    with ProgressBars() as bars:
        tick = bars.start_stage("watch", len(prompts))
        temperature = options.get("temperature", 0.0)
        how = options["max_new_tokens"], temperature, tick, seed
        hidden, accepted = record_verdicts(model, prompts, *how)
    head, loss = fit_head(hidden, accepted, seed=seed)
    file = model.parts.profiles.acceptance_file
    save_head(head, file, model.bundle.sha256)
    line = f"{file}: {len(accepted)} drafted tokens, {accepted.mean():.2f} of them "
    line += f"accepted, held-out loss {loss:.2f}"
    click.echo(line, err=True)


@click.command("use", cls=Command)
@flags.bundle_argument
@click.argument("folder", metavar="DIR", type=flags.PATH)
@record_flags("options", learning.UseOptions)
def use(bundle: Path, folder: Path, options: learning.UseOptions) -> None:
    """Train BUNDLE's drafter on its wrong drafts, which serve --learn keeps in DIR.

    A model that runs with the same DIR takes the weights between two texts, and takes
    them back if fewer of their tokens are accepted.
    """
    pace = learning.Pace(options.seconds, options.watts)
    if not has_learned(folder) and not (options.background and is_free(folder)):
        fact = f"no lessons are kept in {folder}; give the folder of serve --learn"
        raise StoreError(fact)
    if options.background:
        learning.lower_priority()
    student = load_student(Bundle.open(bundle), options.source, options.target)
    training = learning.UseTraining(student, folder, options)
    if options.background:

        def wait(reason: str) -> None:
            click.echo(f"waiting: {reason}", err=True)

        learning.Background(training, pace, wait).run(_print_learned)
        return
    choice = training.sets.read_choice()
    if choice.before is not None:
        trial = f"{label(choice.name)} is still on trial"
        click.echo(f"{trial}; what is learned now will replace it", err=True)
    with ProgressBars() as bars:
        learned = training.run(pace, bars)
    _print_learned(learned)


def _print_learned(learned: learning.Learned) -> None:
    before, after = learned.before, learned.after
    if learned.name is not None:
        outcome = f"the weights {learned.name[:12]} are on trial"
    elif after.loss < before.loss:
        outcome = "the lessons were erased meanwhile, so nothing was published"
    else:
        outcome = "nothing was learned, and nothing was published"
    work = f"{learned.steps} steps on {learned.places} wrong places"
    losses = f"held-out loss {before.loss:.2f} to {after.loss:.2f}"
    rates = f"right {before.right:.2f} to {after.right:.2f}"
    click.echo(f"{work}: {losses}, {rates}; {outcome}", err=True)
