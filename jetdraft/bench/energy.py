"""Energy from a Jetson's power monitors."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from jetdraft.devices.rails import totals

INTERVAL = 0.05


class Meter:
    """Adds up the energy of its block in `joules`, None on a machine without monitors.

    with Meter() as meter:
        model.generate("def fib(n):")
    meter.joules
    """

    def __init__(self, root: Path = Path("/"), interval: float = INTERVAL) -> None:
        self.joules: float | None = None
        self._rails = totals(root)
        self._interval = interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Meter:
        if self._rails:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop after one more reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Add trapezoids between readings; a vanished rail ends the measurement."""
        joules, before, watts = 0.0, time.perf_counter(), self._watts()
        done = False
        while watts is not None and not done:
            done = self._stop.wait(self._interval)
            now, next_watts = time.perf_counter(), self._watts()
            if next_watts is None:
                self.joules = None  # the energy until now would be too little
                return
            joules += (now - before) * (watts + next_watts) / 2
            before, watts = now, next_watts
            self.joules = joules

    def _watts(self) -> float | None:
        try:
            return sum(rail.watts() for rail in self._rails)
        except (OSError, ValueError):
            return None
