"""The vocabulary as constraints need it, in a process apart; see worker.py."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from weakref import finalize

from jetdraft.errors import OptionError
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.link import EndedError, Link, MustEnd
from jetdraft.runtime.text.matcher import Matcher

MOST_BYTES = 256 << 20
"""Memory that one constraint may take beside the vocabulary's."""

START_SECONDS = 60.0
"""A vocabulary of 150,000 tokens is read in 2 s."""


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

    def matcher(
        self, constraint: Constraint, start: int, must_end: MustEnd = lambda: False
    ) -> Matcher:
        """A matcher for the text after a prompt of `start` tokens, not prepared yet."""
        return Matcher(self.link, constraint, self._size, start, must_end)

    def start(self) -> None:
        """Read the vocabulary, unless that is done; raises `OptionError`."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def link(self) -> Link:
        """A worker for one text; raises `OptionError`."""
        self.start()
        link, other = _pair()
        # If the process has just ended, the first request says so.
        with other, self._lock, suppress(OSError):
            if self._control is not None:
                self._control.hand_over(other, MOST_BYTES)
        return link

    def _start(self) -> None:
        """Start the process and wait until it has read the vocabulary."""
        self._drop()  # what is left of a process that ended
        link, other = _pair()
        setting = {
            "path": sys.path,
            "tokenizer": str(self._tokenizer),
            "size": self._size,
            "ends": self._ends,
        }
        with other:
            process = _popen(other.fileno(), json.dumps(setting))
        drop = finalize(self, _end, process, link)
        try:
            _await(link)
        except BaseException:
            drop()
            raise
        # Only now may others use it.
        self._process, self._control, self._drop = process, link, drop


def _await(link: Link) -> None:
    """Wait until the process has read the vocabulary; raises `OptionError`."""
    try:
        reply, _ = link.reply(START_SECONDS, lambda: False)
    except EndedError as error:
        raise _failure("it ended") from error
    if reply:
        raise OptionError(
            f"texts of this tokenizer cannot be constrained ({reply['error']}); "
            "use a model with a byte-level or sentencepiece tokenizer",
            "constraint",
        )


def _pair() -> tuple[Link, socket.socket]:
    """A link, and the end of it for another process."""
    try:
        own, other = socket.socketpair()
    except OSError as error:
        raise _failure(error) from error
    return Link(own), other


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
