"""Ctrl-C that waits until weights and optimizers agree."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """Raise the `KeyboardInterrupt` of the block at its end.

    with held_back():
        optimizer.step()
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts its main thread only
        return
    interrupts: list[int] = []
    before = signal.signal(
        signal.SIGINT, lambda number, frame: interrupts.append(number)
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt
