import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from urllib.parse import urlsplit

from jetdraft.server.app import Service
from jetdraft.server.http_server import HttpServer, listener_url, open_listener

Serving = AbstractContextManager[tuple[subprocess.Popen[str], str]]
# Slow enough to be interrupted, and with signals as a terminal would have them.
SLOW = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jetdraft.cli import main
from jetdraft.runtime.sampling.chooser import Chooser
choose, seconds = Chooser.choose, float(os.environ["SLOW"])
def slowly(*arguments):
    time.sleep(seconds)
    return choose(*arguments)
Chooser.choose = slowly
main(sys.argv[1:])
"""


@contextmanager
def served(service: Service, *more: socket.socket) -> Iterator[str]:
    with open_listener("127.0.0.1", 0) as first:
        server = HttpServer(service, "127.0.0.1")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [first, *more]})
        thread.start()
        try:
            until(lambda: server.started)
            yield listener_url(first)
        finally:
            server.should_exit = True
            thread.join(60)


@contextmanager
def serving(
    command: list[str], **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+", process.stderr.readline())
            assert found, process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


def started(*arguments: object, slow: float = 0.0) -> Serving:
    """Like `serving`, of `jetdraft serve`; each choice takes `slow` seconds more."""
    command = [sys.executable, "-c", SLOW, "serve", *map(str, arguments)]
    return serving([*command, "--port", "0", "--threads", "1"], SLOW=str(slow))


def request(body: object, version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    return (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode() + content


def connect(
    address: str, body: object = None, buffer: int | None = None
) -> socket.socket:
    """A client that has asked, for `body` if there is one, and reads nothing yet."""
    place, line = urlsplit(address), socket.socket()
    line.settimeout(60)
    if buffer is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    line.connect((place.hostname, place.port))
    if body is not None:
        line.sendall(request(body))
    return line


def read(line: socket.socket) -> bytes:
    return b"".join(iter(lambda: line.recv(65536), b""))


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
