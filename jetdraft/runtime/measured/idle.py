"""Work in a thread of its own while nobody uses a model's buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread, main_thread
from weakref import WeakMethod

QUIET_SECONDS = 0.25
"""The work begins this long after the last generation."""

QUIET_TURNS = 5
"""How often the thread looks in this time whether the interpreter ends."""

Work = Callable[[Callable[[], bool]], bool]
"""Does one step, and gives False when nothing is left.

It may raise `StoppedError` when the function that it gets says that it must stop.
"""


class StoppedError(Exception):
    """Somebody wants the buffers; the step must be repeated later."""


class Idle:
    """Does steps of work between generations; a generation waits for one pass at most.

    `work` must be a bound method; the thread does not keep its object alive. `before`
    is called once, before the first step, and does not touch the buffers.

        idle = Idle(survey.step, gather)
        idle.start()
        with idle.paused():
            ...    # the buffers are free
    """

    def __init__(self, work: Work, before: Callable[[], object]) -> None:
        self._work, self._before = WeakMethod(work), before
        self._is_prepared = self._is_done = False
        self._buffers, self._count = Lock(), Lock()
        self._users = 0
        self._wanted = Event()
        self._thread: Thread | None = None

    def start(self) -> None:
        """Go on with the work soon, in a thread."""
        alive = self._thread is not None and self._thread.is_alive()
        # A stream may end with the interpreter, which starts no thread any more.
        if main_thread().is_alive() and not (alive or self._is_done):
            self._thread = Thread(target=self._run, name="jetdraft-idle")
            self._thread.start()

    def stop(self) -> None:
        """End the thread; it may wait for the end of `before` or of one pass."""
        with self.paused():
            if self._thread is not None:
                self._thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the thread from the buffers in the block; several blocks may overlap."""
        self._count_users(1)
        with self._buffers:
            pass  # a step that was under way has ended
        try:
            yield
        finally:
            self._count_users(-1)

    def _count_users(self, more: int) -> None:
        with self._count:
            self._users += more
            if self._users:
                self._wanted.set()
            else:
                self._wanted.clear()

    def _must_stop(self) -> bool:
        # The interpreter waits for threads before it ends.
        return self._wanted.is_set() or not main_thread().is_alive()

    def _run(self) -> None:
        for _ in range(QUIET_TURNS):
            if self._must_stop() or self._wanted.wait(QUIET_SECONDS / QUIET_TURNS):
                return
        if not self._is_prepared:
            self._before()
            self._is_prepared = True
        while self._one_step():
            pass

    def _one_step(self) -> bool:
        """Whether a step was done, and there may be more."""
        with self._buffers:
            work = self._work()
            if self._must_stop() or work is None:
                return False
            try:
                self._is_done = not work(self._must_stop)
                return not self._is_done
            except StoppedError:
                return False
