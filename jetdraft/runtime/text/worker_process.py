"""The process that follows constraints, from the runtime's side; see worker_main.py."""

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

from jetdraft.errors import OptionError, as_error

SLICE_SECONDS = 0.05  # How long a wait blocks before it checks whether it must end.
# A worker without a free core is given up after `PATIENCE` times its limit.
PATIENCE = 10.0
MIN_READ_BYTES = 4096  # Bytes read at once, so that a short reply is read by one call.
MAX_BYTES = 256 << 20  # Memory that one constraint may take beside the vocabulary's.
START_SECONDS = 60.0  # A vocabulary of 150,000 tokens is read in 2 s.
# The fact, the fix and the field of an `OptionError`.
_NOT_STARTED = (
    "the process that follows constraints could not be started",
    *("make room for it, or leave the constraint out", "constraint"),
)
MustEnd = Callable[[], bool]  # Whether it is cancelled, or its time is over.


class EndedError(Exception):
    """The worker has ended, or it took too long and was ended."""


class Pipe:
    """Sends a worker requests and waits for replies; closing `life` ends the worker."""

    def __init__(self, end: socket.socket, *life: socket.socket) -> None:
        self._socket, self._data = end, b""
        self.close = finalize(self, _close_sockets, end, *life)  # ends the worker
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
                self._check_wait(until, must_end)
            except OSError as error:
                raise self._close_with_error() from error

    def receive_reply(self, seconds: float, must_end: MustEnd) -> tuple[Any, bytes]:
        """Wait for a value and masks; raises `EndedError`, see `PATIENCE`."""
        until = time.monotonic() + PATIENCE * seconds
        sizes = struct.unpack("<II", self._receive_bytes(8, until, must_end))
        text, masks = (self._receive_bytes(size, until, must_end) for size in sizes)
        return json.loads(text), masks

    def has_reply(self) -> bool:
        """Whether a reply has come or the worker has ended; waits `SLICE_SECONDS`."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return not isinstance(error, TimeoutError)
        return True

    def request_worker(self, *ends: socket.socket) -> None:
        """Ask for a worker with `MAX_BYTES` of memory, which gets these socket ends."""
        size = MAX_BYTES.to_bytes(8, "little")
        socket.send_fds(self._socket, [size], [end.fileno() for end in ends])

    def _receive_bytes(self, size: int, until: float, must_end: MustEnd) -> bytes:
        while len(self._data) < size:
            try:
                more = self._socket.recv(max(size - len(self._data), MIN_READ_BYTES))
            except TimeoutError:
                self._check_wait(until, must_end)
                continue
            except OSError:
                more = b""
            if not more:
                raise self._close_with_error()
            self._data += more
        data, self._data = self._data[:size], self._data[size:]
        return data

    def _check_wait(self, until: float, must_end: MustEnd) -> None:
        if time.monotonic() > until or must_end():
            raise self._close_with_error()

    def _close_with_error(self) -> EndedError:
        """Close the sockets, which ends the worker; returns the error to raise."""
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
        missing = "tokenizer" if tokenizer is None else "end-of-text token"
        fact = ""
        if tokenizer is None or not ends:
            fact = f"the bundle has no {missing}, so its texts cannot be constrained; "
            fact += f"export a checkpoint with a {missing}"
        elif find_spec("llguidance") is None:
            fact = "constraints need llguidance; pip install 'jetdraft[structured]'"
        elif sys.platform != "linux":  # the worker limits itself by Linux's means
            fact = "constraints are followed on Linux only; leave the constraint out"
        if fact:
            raise OptionError(fact, "constraint")
        self.size = size
        self._tokenizer, self._ends = tokenizer, list(ends)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Pipe | None = None
        self._drop: Callable[[], object] = lambda: None
        self._is_read, self._until = False, 0.0

    def start(self, must_end: MustEnd = never) -> None:
        """Read the vocabulary, once; raises `OptionError` or `EndedError`."""
        with self._running(must_end):
            pass

    def start_worker(self, must_end: MustEnd = never) -> Pipe:
        """Start a worker for one text; raises what `start` raises."""
        (own, other), (life, watched) = _socket_pair(), _socket_pair()
        pipe = Pipe(own, life)
        # If the process has just ended, the first request says so.
        with other, watched, self._running(must_end) as control, suppress(OSError):
            control.request_worker(other, watched)
        return pipe

    @contextmanager
    def _running(self, must_end: MustEnd) -> Iterator[Pipe]:
        """Hold the process that has read the vocabulary; raises as `start` does."""
        while not self._lock.acquire(timeout=SLICE_SECONDS):
            if must_end():
                raise EndedError
        try:
            if self._process is None or self._process.poll() is not None:
                self._start_process()
            assert self._control is not None
            if not self._is_read:
                self._await_vocabulary(self._control, must_end)
            yield self._control
        finally:
            self._lock.release()

    def _start_process(self) -> None:
        """Start the process, and drop what is left of an earlier process."""
        self._drop()
        own, other = _socket_pair()
        pipe = Pipe(own)
        setting: dict[str, Any] = {"size": self.size, "ends": self._ends}
        setting |= {"path": sys.path, "tokenizer": str(self._tokenizer)}
        with other:
            process = _run_program(other.fileno(), json.dumps(setting))
        self._drop = finalize(self, _end_process, process, pipe)
        self._process, self._control = process, pipe
        self._is_read, self._until = False, time.monotonic() + START_SECONDS

    def _await_vocabulary(self, control: Pipe, must_end: MustEnd) -> None:
        while not control.has_reply() and time.monotonic() < self._until:
            if must_end():
                raise EndedError
        try:
            reply, _ = control.receive_reply(0.0, never)
        except EndedError as error:
            self._drop()
            fact, fix, field = _NOT_STARTED
            raise OptionError(f"{fact} (it ended); {fix}", field) from error
        if reply:
            self._drop()
            fact = f"texts of this tokenizer cannot be constrained ({reply['error']})"
            fix = "use a model with a byte-level or sentencepiece tokenizer"
            raise OptionError(f"{fact}; {fix}", "constraint")
        self._is_read = True


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets, the second for another process; raises `OptionError`."""
    with as_error(OptionError, OSError, *_NOT_STARTED):
        return socket.socketpair()


def _run_program(end: int, setting: str) -> subprocess.Popen[bytes]:
    program, none = Path(__file__).with_name("worker_main.py"), subprocess.DEVNULL
    command = [sys.executable, "-I", str(program), str(end), setting]
    silent: Any = {"stdin": none, "stdout": none, "stderr": none}
    with as_error(OptionError, OSError, *_NOT_STARTED):
        return subprocess.Popen(command, pass_fds=[end], **silent)


def _end_process(process: subprocess.Popen[bytes], control: Pipe) -> None:
    control.close()
    process.kill()
    process.wait()


def _close_sockets(*ends: socket.socket) -> None:
    """Close sockets, also in a process that was forked from this one."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
