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
        self._holder: StopWatcher | None = None
        self._preparing: StopWatcher | None = None
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
        self._holder = watcher
        try:
            with self._idle.paused():
                yield
        finally:
            self._holder = None
            self._lock.release()
            self._idle.start()

    @contextmanager
    def preparing(self, watcher: StopWatcher) -> Iterator[None]:
        """Let `cancel` reach a generation that needs no buffers yet."""
        self._preparing = watcher
        try:
            yield
        finally:
            self._preparing = None

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
        for watcher in (self._holder, self._preparing):
            if watcher is not None:
                watcher.cancelled.set()
