"""Learning from use beside a running model, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable

from jetdraft.kept.lessons import Lesson
from jetdraft.train.use.pace import Pace
from jetdraft.train.use.use_training import Learned, UseTraining

LOOK_SECONDS = 5.0
"""The time between two looks at the lessons."""


class Background:
    """Trains when there are enough new wrong places, and no weights are on trial.

    It ends when the seconds of `pace` are spent; `wait` gets the seconds to sleep.

        Background(training, Pace(seconds=600.0)).run(print)
    """

    def __init__(
        self,
        training: UseTraining,
        pace: Pace,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._training, self._pace, self._wait = training, pace, wait
        self._known: set[bytes] = set()

    def run(self, tell: Callable[[Learned], None]) -> None:
        """Train until the time is spent; `tell` gets the figures of each training."""
        while self._pace.has_time:
            lessons = self._training.lessons.read()
            if self._is_due(lessons):
                self._known = {lesson.tokens.tobytes() for lesson in lessons}
                tell(self._training.run(self._pace))
            else:
                self._wait(LOOK_SECONDS)

    def _is_due(self, lessons: list[Lesson]) -> bool:
        if self._training.sets.choice().before is not None:
            return False  # the running model has not judged yet
        new = [x for x in lessons if x.tokens.tobytes() not in self._known]
        places = sum(len(lesson.places) for lesson in new)
        return places >= self._training.options.least
