"""Learning from use beside a running model: at its pace, again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from jetdraft.learning.lessons import Lesson
from jetdraft.learning.weight_sets import label
from jetdraft.train.use.learning import Learned, Pace, UseTraining

LOOK_SECONDS = 5.0
"""The time between two looks at the lessons."""


def lower_priority() -> None:
    """Run this process on one core, and only while no other process wants it."""
    os.nice(19)
    with suppress(AttributeError, OSError):  # Linux has a class below all others
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)


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
