"""A training that stands back: idle priority, a budget of seconds, a limit of watts."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from jetdraft.devices.rails import totals
from jetdraft.errors import DeviceError

REST = 1.0
"""Seconds between two looks at the power while a training waits."""


def stand_back() -> None:
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

        pace = Pace(seconds=60.0)
        while pace.goes_on():
            ...    # a step
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
            time.sleep(REST)
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
