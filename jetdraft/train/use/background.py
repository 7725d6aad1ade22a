"""Learning from use beside a running model: at its pace, again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import torch

from jetdraft.bundle import Bundle
from jetdraft.cli.command import Command, option
from jetdraft.cli.flags import PATH, bundle_argument
from jetdraft.cli.progress import ProgressBars
from jetdraft.devices.rails import totals
from jetdraft.errors import DeviceError, StoreError
from jetdraft.files import is_free
from jetdraft.learning.lessons import Lesson
from jetdraft.learning.weight_sets import is_learned, label
from jetdraft.train.task import setting_flags
from jetdraft.train.use.learning import Learned, UseOptions, UseTraining
from jetdraft.train.use.students import student_of

REST_SECONDS = 1.0
"""Seconds between two looks at the power while a training waits."""


def lower_priority() -> None:
    """Run this process only when nobody else wants the cores, on one of them."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # Linux has a class below all others
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)


class Pace:
    """When a training may take its next step.

    `seconds` bound the time of training, and `watts` the power of the module while a
    step begins; None is no bound. `root` is where sysfs is found. Raises `DeviceError`
    for a bound of watts on a machine that does not tell its power.
    """

    def __init__(
        self,
        seconds: float | None = None,
        watts: float | None = None,
        root: Path = Path("/"),
    ) -> None:
        self.seconds, self.watts = seconds, watts
        self.spent = 0.0
        self._began: float | None = None
        self._rails = [] if watts is None else totals(root)
        if watts is not None and not self._rails:
            raise DeviceError(
                "this machine has no power monitors (INA3221) to read watts from; "
                "leave --watts out"
            )

    @property
    def has_time(self) -> bool:
        """Whether the seconds are not spent yet."""
        return self.seconds is None or self.spent < self.seconds

    def goes_on(self) -> bool:
        """Whether there is time for a step; waits while the module draws too much."""
        self.rest()
        while self._is_hot():
            time.sleep(REST_SECONDS)
        self._began = time.monotonic()
        return self.has_time

    def rest(self) -> None:
        """The training pauses or has ended; what follows does not count."""
        if self._began is not None:
            self.spent += time.monotonic() - self._began
        self._began = None

    def _is_hot(self) -> bool:
        if self.watts is None:
            return False
        try:
            return sum(rail.watts() for rail in self._rails) > self.watts
        except (OSError, ValueError):
            return False  # a rail has vanished; the seconds still bound the training


LOOK_SECONDS = 5.0
"""The time between two looks at the lessons."""


class Background:
    """Trains when there are enough new wrong places, and no weights are on trial.

    It ends when the seconds of `pace` are spent. `say` gets the reason of each wait
    once, and `wait` the seconds to sleep.
    """

    def __init__(
        self,
        training: UseTraining,
        pace: Pace,
        say: Callable[[str], None] = lambda reason: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._training, self._pace = training, pace
        self._say, self._wait = say, wait
        self._known: set[bytes] = set()
        self._cleared = ""

    def run(self, tell: Callable[[Learned], None]) -> None:
        """Train until the time is spent; `tell` gets the figures of each training."""
        said = ""
        while self._pace.has_time:
            lessons = self._training.lessons.read()
            self._forget_if_cleared()
            reason = self._obstacle(lessons)
            if reason:
                if reason != said:
                    self._say(reason)
                self._wait(LOOK_SECONDS)
            else:
                self._known = {lesson.tokens.tobytes() for lesson in lessons}
                tell(self._training.run(self._pace))
            said = reason

    def _forget_if_cleared(self) -> None:
        """A clear has deleted all weights, so what is left is to be learned again."""
        cleared = self._training.sets.choice().cleared
        if cleared != self._cleared:
            self._cleared, self._known = cleared, set()

    def _obstacle(self, lessons: list[Lesson]) -> str:
        """Why no training can begin; empty if it can."""
        choice = self._training.sets.choice()
        if choice.before is not None:
            return f"{label(choice.name)} is on trial until a model has used it"
        new = [x for x in lessons if x.tokens.tobytes() not in self._known]
        places, least = sum(len(o.places) for o in new), self._training.options.least
        if places < least:
            return f"there are fewer than {least} new wrong places to learn from"
        return ""


# --- the command --------------------------------------------------------------------


@click.command("use", cls=Command)
@bundle_argument
@click.argument("folder", metavar="DIR", type=PATH)
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
@setting_flags(UseOptions)
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
    settings: UseOptions,
) -> None:
    """Train BUNDLE's drafter on its wrong drafts, which serve --learn keeps in DIR.

    A model that runs with the same DIR takes the weights between two texts, and takes
    them back if fewer of their tokens are accepted.
    """
    pace = Pace(seconds, watts)
    if not is_learned(folder) and not (background and is_free(folder)):
        raise StoreError(
            f"no lessons are kept in {folder}; give the folder of serve --learn"
        )
    if background:
        lower_priority()
    student = student_of(Bundle.open(bundle), source, target)
    training = UseTraining(student, folder, settings)
    if background:
        Background(training, pace, _print_reason).run(_print_learned)
        return
    choice = training.sets.choice()
    if choice.before is not None:
        trial = f"{label(choice.name)} is still on trial"
        click.echo(f"{trial}; what is learned now will replace it", err=True)
    with ProgressBars() as bars:
        learned = training.run(pace, bars)
    _print_learned(learned)


def _print_reason(reason: str) -> None:
    click.echo(f"waiting: {reason}", err=True)


def _print_learned(learned: Learned) -> None:
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
