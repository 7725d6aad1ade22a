"""Who may ask: the host name that a request names, and the API key."""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.requests import Request

from jetdraft.errors import OptionError
from jetdraft.server.connection import is_local_user
from jetdraft.server.refusal import RequestError

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_KEY = re.compile(r"[!-~]+")


class Admission:
    """Admits requests with the right key, or, without a key, for local names only.

    `key` is "" for a server without a key; `host` is the address that it listens on.
    """

    def __init__(self, key: str = "", host: str = "127.0.0.1") -> None:
        if key:
            check_key(key)
        self._key, self._local = key.encode(), is_loopback(host) and not key

    def check(self, request: Request, keyed: bool = True) -> None:
        """Raise `RequestError` for a wrong host name or, where `keyed`, a wrong key."""
        self._check_host(request)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(key.strip().encode(), self._key)
        if keyed and self._key and not (right and scheme.lower() == "bearer"):
            raise RequestError(
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    def _check_host(self, request: Request) -> None:
        header = request.headers.get("host")
        name = None if header is None else host_name(header)
        if name is None and (header is not None or self._local):
            raise RequestError(
                f"the Host header {header!r} names no host; ask for localhost"
            )
        # A foreign page can point a host name of its own to this address, but no page
        # reaches a socket in the file system.
        by_network = not is_local_user(request.scope["client"])
        if self._local and by_network and not is_loopback(name or ""):
            raise RequestError(f"{name!r} is not this server; ask for localhost")


def host_name(header: str) -> str | None:
    """Return the host of a Host header, or None if the header is malformed.

    Stricter than the URL standard: it allows the characters of DNS names only.
    """
    match = _HOST.fullmatch(header)
    if match is None or int(match[3] or 0) > 65535:
        return None
    return match[1] or match[2]


def check_key(key: str) -> None:
    """Raise `OptionError` for a key that no client could send."""
    if not key:
        raise OptionError(
            "the API key is empty; give a key, or unset JETDRAFT_API_KEY", "api_key"
        )
    if not _KEY.fullmatch(key):
        raise OptionError(
            "the API key has a space, or a character that no header can hold; give "
            "letters, digits and punctuation of ASCII",
            "api_key",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
