"""The process that follows constraints, from the runtime's side; see worker_main.py.

A `Vocabulary` owns the process, which forks a worker for each text; a `Pipe` speaks
with one of them.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

from jetdraft.errors import OptionError

SLICE_SECONDS = 0.05
"""How often a wait looks whether it must end."""

PATIENCE = 10.0
"""A worker counts the seconds that it computes, and ends itself in time. Where other
programs have the cores, it is given up after `PATIENCE` times its limit."""

MIN_READ_BYTES = 4096
"""Bytes read at once, so that a short reply is read by one call."""

MOST_BYTES = 256 << 20
"""Memory that one constraint may take beside the vocabulary's."""

START_SECONDS = 60.0
"""The longest start; a vocabulary of 150,000 tokens is read in 2 s."""

MustEnd = Callable[[], bool]


class EndedError(Exception):
    """The worker has ended, or it was given up."""


class Pipe:
    """Asks a worker and waits for its replies, never longer than it should.

    To close `life`, a socket that carries nothing, ends the worker.
    """

    def __init__(self, end: socket.socket, *life: socket.socket) -> None:
        self._socket, self._data = end, b""
        self.close = finalize(self, _shut, end, *life)  # ends the worker
        end.settimeout(SLICE_SECONDS)

    def send(self, seconds: float, must_end: MustEnd, *request: Any) -> None:
        """Send a request to compute for `seconds`; raises `EndedError`."""
        text = json.dumps([seconds, *request]).encode()
        rest = memoryview(struct.pack("<I", len(text)) + text)
        until = time.monotonic() + PATIENCE * seconds
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except TimeoutError:
                self._check(until, must_end)
            except OSError as error:
                raise self._ended() from error

    def reply(self, seconds: float, must_end: MustEnd) -> tuple[Any, bytes]:
        """A value and masks, in `PATIENCE` times `seconds`; raises `EndedError`."""
        until = time.monotonic() + PATIENCE * seconds
        sizes = struct.unpack("<II", self._receive(8, until, must_end))
        text, masks = (self._receive(size, until, must_end) for size in sizes)
        return json.loads(text), masks

    def has_reply(self) -> bool:
        """Whether a reply has come, or none will, after `SLICE_SECONDS` at most."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return not isinstance(error, TimeoutError)
        return True

    def hand_over(self, *ends: socket.socket) -> None:
        """Ask for a worker at these other ends."""
        size = MOST_BYTES.to_bytes(8, "little")
        socket.send_fds(self._socket, [size], [end.fileno() for end in ends])

    def _receive(self, size: int, until: float, must_end: MustEnd) -> bytes:
        while len(self._data) < size:
            try:
                more = self._socket.recv(max(size - len(self._data), MIN_READ_BYTES))
            except TimeoutError:
                self._check(until, must_end)
                continue
            except OSError as error:
                raise self._ended() from error
            if not more:
                raise self._ended()
            self._data += more
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _check(self, until: float, must_end: MustEnd) -> None:
        if time.monotonic() > until or must_end():
            raise self._ended()

    def _ended(self) -> EndedError:
        self.close()
        return EndedError()


def never() -> bool:
    """The `must_end` of work that nothing ends early."""
    return False


class Vocabulary:
    """The tokenizer as the library needs it; `ends` are the ids that end a text.

    The process that reads it starts with the first constraint and ends with this
    object. Raises `OptionError` if the library is missing, and off Linux.
    """

    def __init__(self, tokenizer: Path | None, size: int, ends: Sequence[int]) -> None:
        if tokenizer is None or not ends:
            missing = "tokenizer" if tokenizer is None else "end-of-text token"
            raise OptionError(
                f"the bundle has no {missing}, so its texts cannot be constrained; "
                f"export a checkpoint with a {missing}",
                "constraint",
            )
        if find_spec("llguidance") is None:
            raise OptionError(
                "constraints need llguidance; pip install 'jetdraft[structured]'",
                "constraint",
            )
        if sys.platform != "linux":  # the worker limits itself by Linux's means
            raise OptionError(
                "constraints are followed on Linux only; leave the constraint out",
                "constraint",
            )
        self.size = size
        self._tokenizer, self._ends = tokenizer, list(ends)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Pipe | None = None
        self._drop: Callable[[], object] = lambda: None
        self._is_read, self._until = False, 0.0

    def start(self, must_end: MustEnd = never) -> None:
        """Read the vocabulary, once; raises `OptionError` or `EndedError`."""
        with self._started(must_end):
            pass

    def worker(self, must_end: MustEnd = never) -> Pipe:
        """A worker for one text; raises what `start` raises."""
        (own, other), (life, watched) = _pair(), _pair()
        pipe = Pipe(own, life)
        # If the process has just ended, the first request says so.
        with other, watched, self._started(must_end) as control, suppress(OSError):
            control.hand_over(other, watched)
        return pipe

    @contextmanager
    def _started(self, must_end: MustEnd) -> Iterator[Pipe]:
        """The process that has read the vocabulary, for one thread at a time."""
        while not self._lock.acquire(timeout=SLICE_SECONDS):
            if must_end():
                raise EndedError
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            if not self._is_read:
                self._await(self._control, must_end)
            yield self._control
        finally:
            self._lock.release()

    def _start(self) -> None:
        self._drop()  # what is left of a process that ended
        own, other = _pair()
        pipe = Pipe(own)
        setting = {
            "path": sys.path,
            "tokenizer": str(self._tokenizer),
            "size": self.size,
            "ends": self._ends,
        }
        with other:
            process = _popen(other.fileno(), json.dumps(setting))
        self._drop = finalize(self, _end, process, pipe)
        self._process, self._control = process, pipe
        self._is_read, self._until = False, time.monotonic() + START_SECONDS

    def _await(self, control: Pipe, must_end: MustEnd) -> None:
        """Wait until the process has read the vocabulary."""
        while not control.has_reply() and time.monotonic() < self._until:
            if must_end():
                raise EndedError
        try:
            reply, _ = control.reply(0.0, never)
        except EndedError as error:
            self._drop()
            raise _failure("it ended") from error
        if reply:
            self._drop()
            raise OptionError(
                f"texts of this tokenizer cannot be constrained ({reply['error']}); "
                "use a model with a byte-level or sentencepiece tokenizer",
                "constraint",
            )
        self._is_read = True


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connected sockets, of which the second is for another process."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise _failure(error) from error


def _popen(end: int, setting: str) -> subprocess.Popen[bytes]:
    program, none = Path(__file__).with_name("worker_main.py"), subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [sys.executable, "-I", program, str(end), setting],
            pass_fds=[end],
            stdin=none,
            stdout=none,
            stderr=none,
        )
    except OSError as error:
        raise _failure(error) from error


def _failure(problem: object) -> OptionError:
    return OptionError(
        f"the process that follows constraints could not be started ({problem}); make "
        "room for it, or leave the constraint out",
        "constraint",
    )


def _end(process: subprocess.Popen[bytes], control: Pipe) -> None:
    control.close()
    process.kill()
    process.wait()


def _shut(*ends: socket.socket) -> None:
    """Close sockets, also in a process that was forked from this one."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
