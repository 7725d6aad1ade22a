"""Who may use the buffers of a model: one generation, or idle work between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from jetdraft.errors import JetdraftError
from jetdraft.runtime.measured.idle import Idle
from jetdraft.runtime.text.stops import StopWatcher

CLOSED = "this model is closed; load the bundle again"


class Claim:
    """Lets one generation at a time use the buffers, and `idle` work in between.

    with claim.held_by(watcher):
        ...
    """

    BUSY = (
        "this model is already generating; finish or close the other stream, or take "
        "another model from a Pool"
    )

    def __init__(self, idle: Idle) -> None:
        self._idle = idle
        self._lock = Lock()
        self._watchers: list[StopWatcher] = []
        self._is_closed = False

    @contextmanager
    def held_by(self, watcher: StopWatcher) -> Iterator[None]:
        """Hold the buffers; raises `JetdraftError` while another generation does.

        After `close` it always raises.
        """
        if self._is_closed:
            raise JetdraftError(CLOSED)
        if not self._lock.acquire(blocking=False):
            raise JetdraftError(self.BUSY)
        try:
            with self._idle.paused(), self.reaching(watcher):
                yield
        finally:
            self._lock.release()
            self._idle.start()

    @contextmanager
    def reaching(self, watcher: StopWatcher) -> Iterator[None]:
        """Let `cancel` reach a generation, with the buffers or without."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def check_free(self) -> None:
        """Raise `JetdraftError` while a generation uses the buffers.

        Idle work ends, and goes on after the next generation.
        """
        if self._lock.locked():
            raise JetdraftError(self.BUSY)
        self._idle.stop()

    def close(self) -> None:
        """Refuse all later generations; raises `JetdraftError` while one is running."""
        self.check_free()
        self._is_closed = True

    def cancel(self) -> None:
        """End the running generation at its next round; any thread may call this."""
        for watcher in list(self._watchers):
            watcher.cancelled.set()
