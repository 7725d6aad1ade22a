"""A listening socket, and the server on it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from jetdraft.errors import OptionError
from jetdraft.server.app import Service

SPARE = 64
"""Connections accepted beyond those of waiting requests: idle ones, and /health."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Give a listening socket, before models are loaded; port 0 picks a free port.

    Raises `OptionError` if the address is taken or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Only `listen` refuses a port that another server listens on.
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OptionError(
            f"cannot listen on {host} port {port} ({error.strerror}); choose another "
            "--port or --host"
        ) from error
    with listener:
        yield listener


def url(listener: socket.socket) -> str:
    """Return the address to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(service: Service, listener: socket.socket, host: str, drain: int) -> None:
    """Serve until SIGTERM or Ctrl-C; then running texts have `drain` seconds to end."""
    config = uvicorn.Config(
        service.app(host),
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=drain,
        limit_concurrency=service.limits.waiting + SPARE,
    )
    # asyncio logs a warning for each write to a client that has gone.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # uvicorn raises the signal again after the last answer.
    with suppress(KeyboardInterrupt, SystemExit):
        uvicorn.Server(config).run(sockets=[listener])
