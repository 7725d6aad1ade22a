"""Running a service until it is told to end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn

from jetdraft.errors import OptionError
from jetdraft.server.app import Service

SPARE = 64
"""Connections beyond those that may wait: that read, are idle, or ask for /health."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound before a model is loaded for it; port 0 is any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # A port that another server listens on is refused only now.
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
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(service: Service, listener: socket.socket, host: str, drain: int) -> None:
    """Answer until SIGTERM or Ctrl-C, then let what is under way end."""
    config = uvicorn.Config(
        service.app(host),
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=drain,
        limit_concurrency=service.limits.waiting + SPARE,
    )
    # It warns of every piece that a client which has left did not get.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # uvicorn raises the signal again when all is answered; ended is ended.
    with suppress(KeyboardInterrupt, SystemExit):
        uvicorn.Server(config).run(sockets=[listener])
