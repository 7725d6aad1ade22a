"""The vocabulary as constraints need it, in a process apart; see worker.py."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from weakref import finalize

from jetdraft.errors import OptionError
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.link import SLICE_SECONDS, EndedError, Link, MustEnd
from jetdraft.runtime.text.matcher import Matcher

MOST_BYTES = 256 << 20
"""Memory that one constraint may take beside the vocabulary's."""

START_SECONDS = 60.0
"""A vocabulary of 150,000 tokens is read in 2 s."""


def _never() -> bool:
    return False


class Vocabulary:
    """The tokenizer as the library needs it; `ends` are the ids that end a text.

    The process that reads it starts with the first constraint and ends with this
    object. Raises `OptionError` if the library is missing.

        Vocabulary(bundle.tokenizer, 4096, [0]).matcher(constraint, len(prompt))
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
        self._tokenizer, self._size, self._ends = tokenizer, size, list(ends)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Link | None = None
        self._drop: Callable[[], object] = lambda: None
        self._is_read, self._until = False, 0.0

    def matcher(
        self, constraint: Constraint, start: int, must_end: MustEnd = _never
    ) -> Matcher:
        """A matcher for the text after a prompt of `start` tokens, not prepared yet."""
        return Matcher(self.link, constraint, self._size, start, must_end)

    def start(self, must_end: MustEnd = _never) -> None:
        """Read the vocabulary, unless that is done; raises `OptionError`.

        Raises `EndedError` if `must_end` says so meanwhile. The process reads on, so
        that the next text does not wait as long.
        """
        with self._started(must_end):
            pass

    def link(self, must_end: MustEnd = _never) -> Link:
        """A worker for one text; raises what `start` raises."""
        (own, other), (life, watched) = _pair(), _pair()
        link = Link(own, life)
        # If the process has just ended, the first request says so.
        with other, watched, self._started(must_end) as control, suppress(OSError):
            control.hand_over(other, watched, MOST_BYTES)
        return link

    @contextmanager
    def _started(self, must_end: MustEnd) -> Iterator[Link]:
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
        """Start the process."""
        self._drop()  # what is left of a process that ended
        own, other = _pair()
        link = Link(own)
        setting = {
            "path": sys.path,
            "tokenizer": str(self._tokenizer),
            "size": self._size,
            "ends": self._ends,
        }
        with other:
            process = _popen(other.fileno(), json.dumps(setting))
        self._drop = finalize(self, _end, process, link)
        self._process, self._control = process, link
        self._is_read, self._until = False, time.monotonic() + START_SECONDS

    def _await(self, control: Link, must_end: MustEnd) -> None:
        """Wait until the process has read the vocabulary."""
        while not control.has_reply() and time.monotonic() < self._until:
            if must_end():
                raise EndedError
        try:
            reply, _ = control.reply(0.0, _never)
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
    program, none = Path(__file__).with_name("worker.py"), subprocess.DEVNULL
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


def _end(process: subprocess.Popen[bytes], control: Link) -> None:
    control.close()
    process.kill()
    process.wait()
