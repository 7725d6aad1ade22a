"""The progress of long commands: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import click

SECONDS_BETWEEN_LINES = 10.0
"""Commands that take less time print no line."""


class ProgressBars:
    """The progress bars of a long command, one after the other: one for each stage.

    They go to standard error. If that is not a terminal, a thread prints the state
    every `SECONDS_BETWEEN_LINES` instead, also while a step takes long. The end of a
    stage that has printed a line is a line too.
    """

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None
        self._done = 0
        self._line: str | None = None
        self._printed = ""
        """The stage of the last printed line."""
        self._started = time.monotonic()
        self._ended = Event()
        self._printer = Thread(target=self._print_lines, daemon=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show a stage: `done` of its `total` steps are done."""
        if not sys.stderr.isatty():
            # Of a single step, "0 of 1" would say nothing.
            state = "" if total == 1 else f", {done} of {total}"
            self._stage = stage
            self._line = f"{stage}{', done' if done >= total else state}"
            if done >= total and stage == self._printed:
                self._print_line()
                self._printed = ""
            return
        if self._bar is None or stage != self._stage:
            self.close()
            self._stage, self._done = stage, 0
            self._bar = click.progressbar(
                length=total, label=f"{stage:18}", file=sys.stderr
            )
        self._bar.update(done - self._done)
        self._done = done

    def _print_lines(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            if self._line is not None:
                self._printed = self._stage
                self._print_line()

    def _print_line(self) -> None:
        seconds = time.monotonic() - self._started
        click.echo(f"after {seconds:.0f} s: {self._line}", err=True)

    def ticks(self, stage: str, total: int) -> Callable[[], None]:
        """Begin a stage; call the function that it returns after each step."""
        self(stage, 0, total)
        done = itertools.count(1)
        return lambda: self(stage, next(done), total)

    def close(self) -> None:
        """End the line of the current bar."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None

    def __enter__(self) -> ProgressBars:
        self._printer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._printer.join()
        self.close()
