"""A connection with a process that follows a constraint; see worker.py."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any
from weakref import finalize

SLICE_SECONDS = 0.05
"""How often a wait looks whether it must end."""

GRACE_SECONDS = 1.0
"""A worker ends itself in time; if the system does not let it, this much is waited."""

MustEnd = Callable[[], bool]


class EndedError(Exception):
    """The worker has ended, or it was given up."""


class Link:
    """Asks a worker and waits for its replies, never longer than it should.

    After an `EndedError` the worker is gone: closing the socket ends it. So does the
    end of this process.

        link.ask(2.0, never, "forced", [5, 8])
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.close = finalize(self, end.close)  # ends the worker
        end.settimeout(SLICE_SECONDS)

    def ask(
        self, seconds: float, must_end: MustEnd, *request: Any
    ) -> tuple[Any, bytearray]:
        """The reply to a request that may take `seconds`: a value and masks.

        Raises `EndedError` if the worker ends, or `must_end` says so meanwhile.
        """
        text = json.dumps([seconds, *request]).encode()
        until = time.monotonic() + seconds + GRACE_SECONDS
        try:
            self._send(struct.pack("<I", len(text)) + text, until, must_end)
        except OSError as error:
            raise self._ended() from error
        return self.reply(until, must_end)

    def reply(self, until: float, must_end: MustEnd) -> tuple[Any, bytearray]:
        """The next reply, which must come `until` a time of the monotonic clock."""
        try:
            header = self._receive(8, until, must_end)
            sizes = struct.unpack("<II", header)
            text, masks = (self._receive(size, until, must_end) for size in sizes)
        except OSError as error:
            raise self._ended() from error
        return json.loads(text), masks

    def hand_over(self, end: socket.socket, most_bytes: int) -> None:
        """Ask for a worker at `end`, which may take `most_bytes` of memory."""
        size = most_bytes.to_bytes(8, "little")
        socket.send_fds(self._socket, [size], [end.fileno()])

    def _send(self, data: bytes, until: float, must_end: MustEnd) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest, socket.MSG_NOSIGNAL) :]
            except TimeoutError:
                self._check(until, must_end)

    def _receive(self, size: int, until: float, must_end: MustEnd) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                self._check(until, must_end)
                continue
            if not count:
                raise self._ended()
            rest = rest[count:]
        return data

    def _check(self, until: float, must_end: MustEnd) -> None:
        if time.monotonic() > until or must_end():
            raise self._ended()

    def _ended(self) -> EndedError:
        self.close()
        return EndedError()
