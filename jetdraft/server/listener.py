"""Listening sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jetdraft.errors import OptionError


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Give a listening socket, before models are loaded; port 0 picks a free port.

    Raises `OptionError` if the address is taken or not allowed.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as opened:
        try:
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            # Only `listen` refuses a port that another server listens on.
            listener.listen(128)
        except (OSError, UnicodeError, TypeError) as error:  # no host has the name
            reason = getattr(error, "strerror", None) or error
            raise OptionError(
                f"cannot listen on {host} port {port} ({reason}); choose another "
                "--port or --host"
            ) from error
        yield listener


def url(listener: socket.socket) -> str:
    """Return the address to open in a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Give a listening socket in the file system that only this user may open.

    A socket without a listener is replaced. Raises `OptionError` if
    anything else is there, or nothing can be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            _remove_stale(path)
            mask = os.umask(0o177)  # never open to others, not even for a moment
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            own = os.lstat(path)
            listener.listen(128)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(
                f"cannot listen on {path} ({reason}); choose another --uds", "uds"
            ) from error
        try:
            yield listener
        finally:
            with suppress(OSError):
                if os.path.samestat(own, os.lstat(path)):
                    path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone; raise `OptionError` otherwise."""
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
    raise OptionError(
        f"another server listens on {path}; end it, or choose another --uds", "uds"
    )
