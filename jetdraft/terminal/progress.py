"""Progress bars on a terminal."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import click


class ProgressBars:
    """The progress bars of a long command, one after the other: one for each stage.

    The bars go to standard error, and only if that is a terminal.

        with ProgressBars() as bars:
            bars("export", 1, 10)
    """

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None
        self._done = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a stage are done."""
        if not sys.stderr.isatty():
            return
        if self._bar is None or stage != self._stage:
            self.close()
            self._stage, self._done = stage, 0
            self._bar = click.progressbar(
                length=total, label=f"{stage:18}", file=sys.stderr
            )
        self._bar.update(done - self._done)
        self._done = done

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
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
