"""A connection with a process that follows a constraint; see worker.py."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import finalize

SLICE_SECONDS = 0.05
"""How often a wait looks whether it must end."""

PATIENCE = 10.0
"""A worker counts the seconds that it computes, and ends itself in time. Where others
have the cores that takes longer; after so many times its limit it is given up."""

LEAST = 4096
"""Bytes read at once, so that a short reply is read by one call."""

MustEnd = Callable[[], bool]


class EndedError(Exception):
    """The worker has ended, or it was given up."""


class Link:
    """Asks a worker and waits for its replies, never longer than it should.

    After an `EndedError` the worker is gone: closing `life` ends it, a socket that
    carries nothing. So does the end of this process.

        link.send(2.0, never, "forced", [5, 8])
        tokens, _ = link.reply(2.0, never)
    """

    def __init__(self, end: socket.socket, *life: socket.socket) -> None:
        self._socket, self._data = end, b""
        self.close = finalize(self, _shut, end, *life)  # ends the worker
        end.settimeout(SLICE_SECONDS)

    def send(self, seconds: float, must_end: MustEnd, *request: Any) -> None:
        """Send a request, which the worker may compute for `seconds`.

        Raises `EndedError` if the worker ends, or `must_end` says so meanwhile.
        """
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
        """The reply to the oldest request: a value and masks.

        Raises `EndedError` if the worker ends, or does not reply in `PATIENCE` times
        `seconds`, or `must_end` says so meanwhile.
        """
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

    def hand_over(
        self, end: socket.socket, life: socket.socket, most_bytes: int
    ) -> None:
        """Ask for a worker at the other ends, which may take `most_bytes` of memory."""
        size = most_bytes.to_bytes(8, "little")
        socket.send_fds(self._socket, [size], [end.fileno(), life.fileno()])

    def _receive(self, size: int, until: float, must_end: MustEnd) -> bytes:
        while len(self._data) < size:
            try:
                more = self._socket.recv(max(size - len(self._data), LEAST))
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


def _shut(*ends: socket.socket) -> None:
    """Close sockets, also in a process that was forked from this one."""
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
