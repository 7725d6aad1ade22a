"""Who may use the buffers of a model: a generation, a measurement, or idle work."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Lock, Thread, get_ident, main_thread
from weakref import WeakMethod

from jetdraft.errors import JetdraftError
from jetdraft.runtime.text.stops import StopWatcher

QUIET_SECONDS = 0.25  # Idle work begins this long after the last generation.
QUIET_TURNS = 5  # How often the idle thread checks in this time whether it must stop.
CLOSED_MESSAGE = "this model is closed; load the bundle again"

Work = Callable[[Callable[[], bool]], bool]
"""Does one step; returns False when no step is left.

Its argument says whether the step must stop; then it may raise `StoppedError`.
"""


class StoppedError(Exception):
    """The buffers are needed elsewhere; the step must be repeated later."""


class Idle:
    """Does steps of work between generations; a generation waits for one pass at most.

    `before` runs once, before the first step, and does not touch the buffers.
    """

    def __init__(self, before: Callable[[], object]) -> None:
        self._works, self._before = list[WeakMethod[Work]](), before
        self._is_prepared, self._is_done = False, True
        self._buffers, self._count = Lock(), Lock()
        self._users = 0
        self._must_wait = Event()
        self._thread: Thread | None = None

    def add(self, work: Work) -> None:
        """Add a bound method; the thread does not keep its object alive."""
        with self._buffers:
            self._works = [w for w in self._works if w()] + [WeakMethod(work)]
            self._is_done = False

    def start(self) -> None:
        """Start the thread that does the steps, unless it runs or no step is left."""
        alive = self._thread is not None and self._thread.is_alive()
        # A stream may end with the interpreter, which starts no thread any more.
        if main_thread().is_alive() and not (alive or self._is_done):
            self._thread = Thread(target=self._run_steps, name="jetdraft-idle")
            self._thread.start()

    @contextmanager
    def paused(self, until_ended: bool = False) -> Iterator[None]:
        """Keep the thread off the buffers in a block; `until_ended` joins it first."""
        self._count_users(1)
        try:
            with self._buffers:
                pass  # a step that was under way has ended
            if until_ended and self._thread is not None:
                self._thread.join()
            yield
        finally:
            self._count_users(-1)

    def _count_users(self, more: int) -> None:
        with self._count:
            self._users += more
            (self._must_wait.set if self._users else self._must_wait.clear)()

    def _must_stop(self) -> bool:
        return self._must_wait.is_set() or not main_thread().is_alive()

    def _run_steps(self) -> None:
        """Wait for `QUIET_SECONDS`, then do steps until the thread must stop."""
        for _ in range(QUIET_TURNS):
            if self._must_stop() or self._must_wait.wait(QUIET_SECONDS / QUIET_TURNS):
                return
        if not self._is_prepared:
            self._before()
            self._is_prepared = True
        while self._do_step():
            pass

    def _do_step(self) -> bool:
        with self._buffers:
            works = [work for known in self._works if (work := known())]
            if self._must_stop() or not works:
                return False
            try:
                self._is_done = not any(work(self._must_stop) for work in works)
                return not self._is_done
            except StoppedError:
                return False


class Claim:
    """Lets one thread at a time use the buffers, and `idle` work in between."""

    BUSY = (
        "this model is already generating; finish or close the other stream, or take "
        "another model from a Pool"
    )

    def __init__(self, idle: Idle) -> None:
        self._idle = idle
        self._lock = Lock()
        self._owner: int | None = None
        self._watchers: list[StopWatcher] = []
        self._is_closed = False

    @contextmanager
    def held_by(self, watcher: StopWatcher) -> Iterator[None]:
        """Hold the buffers for a generation, which `cancel` can end by its `watcher`.

        Raises `JetdraftError` if another holds them, or after `close`.
        """
        with ExitStack() as held:
            if self._owner != get_ident():
                self._acquire()
                held.callback(self._idle.start)  # after the release
                held.callback(self._lock.release)
                held.enter_context(self._idle.paused())
            held.enter_context(self.register_watcher(watcher))
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the buffers, as `held_by`; in the block this thread may generate."""
        if self._owner == get_ident():
            yield
            return
        self._acquire()
        self._owner = get_ident()
        try:
            with self._idle.paused(until_ended=True):
                yield
        finally:
            self._owner = None
            self._lock.release()

    def _acquire(self) -> None:
        """Take the lock at once; raises `JetdraftError` if it is held or closed."""
        is_free = self._lock.acquire(blocking=False)
        if self._is_closed:  # asked with the lock, since `close` needs it too
            if is_free:
                self._lock.release()
            raise JetdraftError(CLOSED_MESSAGE)
        if not is_free:
            raise JetdraftError(self.BUSY)

    @contextmanager
    def register_watcher(self, watcher: StopWatcher) -> Iterator[None]:
        """In the block, let `cancel` end this watcher's generation; hold no buffers."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def close(self) -> None:
        """Refuse all later use; raises `JetdraftError` while the buffers are held."""
        with self.held():
            self._is_closed = True

    def cancel(self) -> None:
        """End the running generation at its next round; any thread may call this."""
        for watcher in list(self._watchers):
            watcher.cancelled.set()
