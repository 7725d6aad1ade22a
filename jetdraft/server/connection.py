"""Limits the connections of clients, and checks Host headers and API keys."""

import asyncio
import hmac
import ipaddress
import json
import os
import re
import resource
import socket
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import h11
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jetdraft.errors import OptionError
from jetdraft.server import RequestError, refusal_fields

REQUEST_SECONDS = 10.0  # The time to send the head of a request.
UNREAD_SECONDS = 60.0  # A client that reads nothing for longer is dropped.
CLIENT_CHECK_SECONDS = 0.25  # Between checks of a half-closed client.
CROWDED_CONNECTIONS = 16  # Further connections, which may ask for /health.
SPARE_FILES = 128  # File descriptors for files and uncounted connections.
# The name of a Unix user begins so; what a Host header and an API key may look like.
_USER_PREFIX = "uid "
_HOST_RE = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_KEY_PATTERN = re.compile(r"[!-~]+")
_ORIGIN_PATTERN = re.compile(r"[a-z][a-z0-9+.-]*://[!-.0-~]+")  # No path.


class ConnectionLimiter:
    """Counts connections: at most `per_peer` of a peer and `most` of all peers.

    `most` is lowered so that this process can still open files. A new connection beyond
    a limit replaces the connection that has waited longest without a whole request: of
    the same peer or, beyond `most`, of the peer with the most connections. If all these
    connections await answers, the new connection may ask for /health only.
    """

    def __init__(self, per_peer: int, most: int) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = soft - len(os.listdir("/proc/self/fd"))  # files that it may still open
        self.most = min(most, free - SPARE_FILES - CROWDED_CONNECTIONS)
        self.per_peer = min(per_peer, self.most)
        self._by_peer: dict[str, list[Connection]] = defaultdict(list)
        self._outside: list[Connection] = []

    def admit(self, connection: "Connection") -> bool:
        """Count a new connection; False if it may ask for /health only."""
        own = self._by_peer.get(connection.peer, [])
        full = None
        if len(own) >= self.per_peer:
            full = own
        elif sum(map(len, self._by_peer.values())) >= self.most:
            full = max(self._by_peer.values(), key=len)
        idle = [connection for connection in full or () if connection.is_idle]
        if idle:
            min(idle, key=lambda connection: connection.since).drop()
        if full is None or idle:
            self._by_peer[connection.peer].append(connection)
            return True
        if len(self._outside) >= CROWDED_CONNECTIONS:
            self._outside[0].drop()
        self._outside.append(connection)
        return False

    def discard(self, connection: "Connection") -> None:
        """Stop counting a connection; nothing happens if it is not counted."""
        own = self._by_peer.get(connection.peer, [])
        for connections in (own, self._outside):
            if connection in connections:
                connections.remove(connection)
        if not own:
            self._by_peer.pop(connection.peer, None)

    def drop_slow(self, now: float) -> None:
        """Close connections that ask or read too slowly; `now` is the loop's time."""
        for connections in [*self._by_peer.values(), self._outside]:
            for connection in list(connections):
                if connection.is_late(now):
                    connection.drop()


class Connection(H11Protocol):
    """One connection of uvicorn's server.

    `peer` names the client: an IPv4 address, a network of 64 bits of IPv6, or the user
    at the other end of a socket in the file system. All connections of a peer share its
    turns. `since` is the loop's time when the connection began to wait for a request.

    A client that closes its sending half after its request gets its answer. Until the
    answer begins, a response 100 from time to time finds out whether the client left:
    every client skips it, while Python's http.client takes other interim responses for
    the answer.
    """

    peer = ""

    def __init__(self, limiter: ConnectionLimiter, **settings: Any) -> None:
        super().__init__(**settings)
        self._limiter = limiter
        self.since = self._read_at = self.loop.time()
        self._unread, self._half_closed = 0, False

    @property
    def is_idle(self) -> bool:
        """Whether the client has yet to send a request, or the rest of a request."""
        return self._is_between_requests or self.cycle.more_body

    @property
    def _is_between_requests(self) -> bool:
        """Whether no request has begun, or the last answer is complete."""
        return self.cycle is None or self.cycle.response_complete

    def is_late(self, now: float) -> bool:
        """Whether the client has sent or read nothing for too long."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread:
            self._read_at = now
        self._unread = unread
        if unread:
            return now - self._read_at > UNREAD_SECONDS
        return self._is_between_requests and now - self.since > REQUEST_SECONDS

    def drop(self) -> None:
        """Close the connection at once, without an answer."""
        self._limiter.discard(self)
        self.transport.abort()

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Set `peer` and count the connection; uvicorn calls it."""
        super().connection_made(transport)
        self.peer = _peer_id(transport)
        self.client = (self.peer, self.client[1] if self.client else 0)
        if not self._limiter.admit(self):
            self.app = _health_only(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection; uvicorn calls it."""
        self._limiter.discard(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Set `since`, as the next request may begin; uvicorn calls it."""
        self.since = self.loop.time()
        super().on_response_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to stay open when the client closes its half."""
        if self.is_idle:
            return False
        if not self._half_closed:
            self._half_closed, self.cycle.keep_alive = True, False
            self._check_client()
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in JSON, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # an answer is under way
            return
        content = json.dumps(refusal_fields(msg, 400)).encode()
        headers = {"content-type": "application/json", "connection": "close"}
        start = h11.Response(status_code=400, headers=list(headers.items()))
        for event in (start, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _check_client(self) -> None:
        """Write a response 100 regularly; that fails if the client has left."""
        cycle = self.cycle
        if cycle.response_started or self.transport.is_closing():
            return  # the answer itself finds it out
        if cycle.scope["http_version"] != "1.0":
            head: dict[str, Any] = {"status_code": 100, "reason": b"Continue"}
            probe = h11.InformationalResponse(**head, headers=[])
            self.transport.write(self.conn.send(probe) or b"")
        self.loop.call_later(CLIENT_CHECK_SECONDS, self._check_client)


def _health_only(app: ASGIApp) -> ASGIApp:
    """Wrap an application so that it refuses all paths but /health, with status 503."""
    message = "too many connections are open; close some, and try again"
    refused = refusal_response(refusal_fields(message, 503), 503)
    # On this connection a client would be refused for ever.
    refused.headers["Connection"] = "close"

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] == "/health" else refused)(scope, receive, send)

    return answer


def _peer_id(transport: asyncio.Transport) -> str:
    """Return what `Connection.peer` is for the other end of a transport."""
    line = transport.get_extra_info("socket")
    if line.family == socket.AF_UNIX:
        data = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"{_USER_PREFIX}{struct.unpack('3i', data)[1]}"
    address = transport.get_extra_info("peername")[0]
    if line.family == socket.AF_INET:
        return str(address)
    six = ipaddress.IPv6Address(address.partition("%")[0])
    if six.ipv4_mapped is not None:
        return str(six.ipv4_mapped)
    network = ipaddress.ip_network((six, 64), strict=False)
    return "::1" if six.is_loopback else str(network)


class Admission:
    """Checks the API key and the Host header of requests.

    Without a `key` ("") and with a loopback address as the server's `host`, a Host
    header must name this machine, so that no foreign web page reaches the server.
    """

    def __init__(self, key: str = "", host: str = "127.0.0.1") -> None:
        if key:
            check_api_key(key)
        self._key, self._local = key.encode(), is_loopback(host) and not key

    def check(self, request: Request, needs_key: bool = True) -> None:
        """Raise `RequestError` for a wrong Host header, or key if it `needs_key`."""
        header = request.headers.get("host")
        name = None if header is None else host_name(header)
        if name is None and (header is not None or self._local):
            fact = f"the Host header {header!r} names no host; ask for localhost"
            raise RequestError(fact)
        # A foreign page can point a host name of its own to this address, but no page
        # reaches a socket in the file system.
        client = request.scope["client"]
        by_network = client is None or not client[0].startswith(_USER_PREFIX)
        if self._local and by_network and not is_loopback(name or ""):
            raise RequestError(f"{name!r} is not this server; ask for localhost")
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")  # Anthropic's clients
        is_right = hmac.compare_digest(key.strip().encode(), self._key)
        if needs_key and self._key and not is_right:
            fact = "the API key is missing or wrong; send Authorization: Bearer KEY"
            fact += ", or x-api-key: KEY"
            raise RequestError(fact, status=401, code="invalid_api_key")


def host_name(header: str) -> str | None:
    """The host in a Host header, in DNS characters, without its port; None if not."""
    match = _HOST_RE.fullmatch(header)
    if match is None or int(match[3] or 0) > 65535:
        return None
    return match[1] or match[2]


def check_api_key(key: str) -> None:
    """Raise `OptionError` for an empty key, or characters that no header can hold."""
    if not key:
        fact = "the API key is empty; give a key, or unset JETDRAFT_API_KEY"
        raise OptionError(fact, "api_key")
    if not _KEY_PATTERN.fullmatch(key):
        fact = "the API key has a space, or a character that no header can hold"
        fix = "give letters, digits and punctuation of ASCII"
        raise OptionError(f"{fact}; {fix}", "api_key")


def check_origins(origins: Sequence[str], is_open: bool) -> None:
    """Raise `OptionError` for what is no origin, or `*` for a server that `is_open`."""
    for origin in origins:
        if origin == "*" and is_open:
            fact = "with --allow-origin '*' any page could ask"
            raise OptionError(f"{fact}; give --api-key, or origins")
        if origin != "*" and not _ORIGIN_PATTERN.fullmatch(origin):
            example = "give, for example, http://localhost:3000"
            raise OptionError(f"{origin!r} is no origin; {example}")


def is_loopback(host: str) -> bool:
    """Whether `host` is an address that only this machine can reach, or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refusal_response(fields: dict[str, Any], status: int) -> Response:
    """Return the HTTP response with an error's fields, see `refusal_fields`."""
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    # Escapes, since a message may quote what no encoding can hold.
    return Response(json.dumps(fields), status, headers, media_type="application/json")
