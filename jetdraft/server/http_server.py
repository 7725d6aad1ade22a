"""uvicorn's server: listening sockets, limits, a log, and the service manager."""

import asyncio
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetdraft.errors import OptionError, as_error, printable
from jetdraft.server.app import Service
from jetdraft.server.connection import Connection, ConnectionLimiter
from jetdraft.server.reply import STATUS_KEY
from jetdraft.server.request_queue import WRITTEN_TOKENS

SPARE_CONNECTIONS = 64  # Beside a client's waiting requests: idle, or /health.
# The number of clients that may use their full number of connections at once.
MAX_BUSY_CLIENTS = 4
END_SECONDS = 5  # After the drain, to send the answers of cut texts.
SWEEP_SECONDS = 0.5  # The seconds between two runs of the checks in `HttpServer`.
ACCEPTED_AT_ONCE = 8  # They use file descriptors before they are counted.
BACKLOG = 128  # Connections that the kernel holds until they are accepted.
POLLED_PATHS = ("/health", "/metrics")  # Monitors' paths: 200 is not logged.
MAX_PATH_CHARS = 200  # The most characters of a path in the log.
log = logging.getLogger("jetdraft.server")


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C; then running texts have `drain` seconds left."""

    def __init__(self, service: Service, host: str, drain: int = 30) -> None:
        per_peer = service.limits.max_waiting + SPARE_CONNECTIONS
        self.limiter = ConnectionLimiter(per_peer, MAX_BUSY_CLIENTS * per_peer)
        self._service, self._drain = service, drain
        self._systemd, self._alive_at = Systemd(os.environ), 0.0
        self._silent_until = 0.0
        # Whether one more Ctrl-C has come, and whether it cut texts.
        self._must_cut, self.has_cut = False, False
        protocol: Any = partial(Connection, self.limiter)
        config = uvicorn.Config(
            log_requests(service.app(host)),
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
        """Accept connections, start the regular checks, and notify systemd."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)
        asyncio.get_running_loop().set_exception_handler(self._report_error)
        self._sweeping = asyncio.create_task(self._check_regularly())
        self._systemd.notify("READY=1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running texts, at most `drain` seconds; then cut them and return."""
        self._systemd.notify("STOPPING=1")
        loop, queue = asyncio.get_running_loop(), self._service.desk
        if texts := len(queue.jobs):
            said = f"finishing {texts} text{'s' * (texts > 1)}, at most {self._drain} s"
            log.info("%s; Ctrl-C cuts %s", said, "them" if texts > 1 else "it")
        end = loop.call_later(self._drain, queue.end_jobs)
        await super().shutdown(sockets)
        end.cancel()
        self._sweeping.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown; a Ctrl-C after it cuts the running texts."""
        if self.should_exit and sig == signal.SIGINT:
            self._must_cut = True
        else:
            super().handle_exit(sig, frame)

    async def _check_regularly(self) -> None:
        """Drop slow connections and notify the watchdog, every `SWEEP_SECONDS`."""
        while True:
            if self._must_cut:  # also a text whose request came later
                self.has_cut |= bool(self._service.desk.jobs)
                self._service.desk.end_jobs()
            self.limiter.drop_slow(asyncio.get_running_loop().time())
            # The watchdog must know that the loop runs and no text is past its end.
            seconds, now = self._systemd.watchdog_seconds, time.monotonic()
            if (
                seconds is not None
                and now >= self._alive_at + seconds / 3
                and self._service.desk.overdue <= seconds
            ):
                self._systemd.notify("WATCHDOG=1")
                self._alive_at = now
            await asyncio.sleep(SWEEP_SECONDS)

    def _report_error(self, loop: asyncio.AbstractEventLoop, context: Any) -> None:
        """Log an error of the loop, a lack of files once a minute."""
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif loop.time() > self._silent_until:
            self._silent_until = loop.time() + 60.0
            fact = "no file is left for a new connection (%s); raise `ulimit -n`"
            logging.getLogger("uvicorn.error").error(fact, context.get("exception"))


def log_requests(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it logs each request when it ends, without texts."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began, status, written = time.monotonic(), 500, list[int]()

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        WRITTEN_TOKENS.set(written)
        try:
            await app(scope, receive, note)
        finally:
            path, status = scope.get("path", ""), scope.get(STATUS_KEY, status)
            if scope["type"] == "http" and (path not in POLLED_PATHS or status != 200):
                tokens = f", {sum(written)} tokens" if written else ""
                ms = 1e3 * (time.monotonic() - began)
                request = printable(f"{scope['method']} {path}", MAX_PATH_CHARS)
                log.info("%s %d%s, %.0f ms", request, status, tokens, ms)

    return answer


def run(service: Service, sockets: list[socket.socket], host: str, drain: int) -> int:
    """Run an `HttpServer` on the sockets to its end; 130 if Ctrl-C cut texts, or 0."""
    # asyncio logs a warning for each write to a client that has gone.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # uvicorn raises the signal again after the last answer.
    server = HttpServer(service, host, drain)
    with suppress(KeyboardInterrupt, SystemExit):
        server.run(sockets=sockets)
    return 128 + signal.SIGINT if server.has_cut else 0


class Systemd:
    """Sends states to systemd, see sd_notify(3); without systemd does nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        pid = str(os.getpid())  # another watchdog is meant for the parent
        microseconds = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", pid) == pid
        is_set = is_ours and microseconds.isdecimal()
        self.watchdog_seconds = int(microseconds) / 1e6 if is_set else None

    def notify(self, state: str) -> None:
        """Send one assignment such as READY=1; errors of the socket are ignored."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.setblocking(False)
            own.sendto(state.encode(), self._address)


@contextmanager
def open_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening TCP socket, closed after the block; raises `OptionError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        causes = OSError, UnicodeError, TypeError  # no host has the name
        fact = f"cannot listen on {host} port {port}"
        with as_error(OptionError, causes, fact, "choose another --port or --host"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            # Only `listen` refuses a port that another server listens on.
            listener.listen(128)
        yield listener


def listener_url(listener: socket.socket) -> str:
    """The URL of a listening socket, to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def open_unix_listener(path: Path) -> Iterator[socket.socket]:
    """Open a listening Unix socket for this user alone; replaces an unused socket.

    It is removed after the block. Raises `OptionError` if it cannot be made there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        fact, fix = f"cannot listen on {path}", "choose another --uds"
        with as_error(OptionError, (OSError, ValueError), fact, fix, "uds"):
            _remove_stale_socket(path)
            mask = os.umask(0o177)  # never open to others, not even for a moment
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            own = os.lstat(path)
            listener.listen(128)
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(own, os.lstat(path)):
                    path.unlink()


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a server that has ended; raise `OptionError` for others."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OptionError(f"{path} is there and no socket; choose another --uds", "uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.setblocking(False)
        try:
            line.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # its queue of connections is full
    fact = f"another server listens on {path}; end it, or choose another --uds"
    raise OptionError(fact, "uds")
