"""uvicorn's server with limits of its connections, a log, and the service manager."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetdraft.errors import printable
from jetdraft.server.app import Service
from jetdraft.server.connection import Connection, Doorkeeper
from jetdraft.server.desk import WRITTEN
from jetdraft.server.events import STATUS

SPARE_CONNECTIONS = 64
"""Connections of a client beside its waiting requests: idle ones, and /health."""

MAX_BUSY_CLIENTS = 4
"""How many clients may have all the connections that one may have."""

END_SECONDS = 5
"""The seconds after the drain for the answers of texts that were ended."""

SWEEP_SECONDS = 0.5

ACCEPTED_AT_ONCE = 8
"""Connections accepted at once. They are not counted yet, but have files."""

BACKLOG = 128
"""Connections that the kernel holds until they are accepted."""

POLLED = ("/health", "/metrics")
"""Paths that are asked all the time: their good answers are not logged."""

MAX_PATH_CHARS = 200
"""Of a path in the log."""

log = logging.getLogger("jetdraft.server")


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C; then running texts have `drain` seconds to end.

    `host` is the address that the server listens on. A second Ctrl-C ends the texts.
    """

    def __init__(self, service: Service, host: str, drain: int = 30) -> None:
        per_peer = service.limits.max_waiting + SPARE_CONNECTIONS
        self.doorkeeper = Doorkeeper(per_peer, MAX_BUSY_CLIENTS * per_peer)
        self._service, self._drain = service, drain
        self._systemd, self._told = Systemd(os.environ), 0.0
        self._is_cut = False
        protocol: Any = partial(Connection, self.doorkeeper)
        config = uvicorn.Config(
            logged(service.app(host)),
            http=protocol,
            ws="none",
            log_level="error",
            lifespan="on",
            proxy_headers=False,  # a header must not choose whose turn it is
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=drain + END_SECONDS,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)
        asyncio.get_running_loop().set_exception_handler(_Complaints())
        self._sweeping = asyncio.create_task(self._sweep())
        self._systemd.tell("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the texts under way, and end them when their time is over."""
        self._systemd.tell("STOPPING=1")
        loop, desk = asyncio.get_running_loop(), self._service.desk
        if texts := len(desk.jobs):
            said = f"finishing {texts} text{'s' * (texts > 1)}, at most {self._drain} s"
            log.info("%s; Ctrl-C cuts %s", said, "them" if texts > 1 else "it")
        end = loop.call_later(self._drain, desk.end)
        await super().shutdown(sockets)
        end.cancel()
        self._sweeping.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let the texts under way end in good order, after one more Ctrl-C at once."""
        if self.should_exit and sig == signal.SIGINT:
            self._is_cut = True
        else:
            super().handle_exit(sig, frame)

    async def _sweep(self) -> None:
        while True:
            if self._is_cut:
                self._service.desk.end()
            self.doorkeeper.sweep(asyncio.get_running_loop().time())
            self._tell_alive()
            await asyncio.sleep(SWEEP_SECONDS)

    def _tell_alive(self) -> None:
        """Tell the watchdog that the loop runs and no text is long past its end."""
        seconds, now = self._systemd.watchdog_seconds, time.monotonic()
        if seconds is None or now < self._told + seconds / 3:
            return
        if self._service.desk.overdue <= seconds:
            self._systemd.tell("WATCHDOG=1")
            self._told = now


def logged(app: ASGIApp) -> ASGIApp:
    """Return an application that logs each request when it ends, but not its texts.

    POST /v1/chat/completions 200, 64 tokens, 812 ms
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began, status, written = time.monotonic(), 500, list[int]()

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        WRITTEN.set(written)
        try:
            await app(scope, receive, note)
        finally:
            path, status = scope.get("path", ""), scope.get(STATUS, status)
            if scope["type"] == "http" and (path not in POLLED or status != 200):
                tokens = f", {sum(written)} tokens" if written else ""
                ms = 1e3 * (time.monotonic() - began)
                request = printable(f"{scope['method']} {path}", MAX_PATH_CHARS)
                log.info("%s %d%s, %.0f ms", request, status, tokens, ms)

    return answer


class _Complaints:
    """Reports errors of the event loop, a lack of files once a minute."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(
        self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
    ) -> None:
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif loop.time() > self._silent_until:
            self._silent_until = loop.time() + 60.0
            logging.getLogger("uvicorn.error").error(
                "no file is left for a new connection (%s); raise `ulimit -n`",
                context.get("exception"),
            )


def run(
    service: Service, listeners: Sequence[socket.socket], host: str, drain: int
) -> None:
    """Serve until SIGTERM or Ctrl-C; then running texts have `drain` seconds to end."""
    # asyncio logs a warning for each write to a client that has gone.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # uvicorn raises the signal again after the last answer.
    with suppress(KeyboardInterrupt, SystemExit):
        HttpServer(service, host, drain).run(sockets=list(listeners))


class Systemd:
    """The service manager of this process, as sd_notify(3) has it.

    `watchdog_seconds` is None without a watchdog. Without a service manager `tell` does
    nothing.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = _watchdog_seconds(environment)

    def tell(self, state: str) -> None:
        """Send one assignment; failures to notify are ignored."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.sendto(state.encode(), self._address)


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # it is meant for the parent
    microseconds = environment.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() else None
