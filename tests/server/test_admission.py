"""Host names and keys that cannot be right."""

import os
import socket

import pytest
from click.testing import CliRunner

from jetdraft.cli import main
from jetdraft.server.connection import host_name
from tests.cli.running import assert_refused
from tests.server.serving import connect, read, request

GOOD = {"model": "toy", "prompt": "a", "max_tokens": 2}
MALFORMED = (
    "ev{il.example", 'ev"il.example', "evil^.example", "evil.example:99999",
    "evil.example:x", "a b", "", "localhost:", "localhost:80:80", "[::1", "::1",
    "localhost/", "localhost@evil.example", "localhost,evil.example", "loc\xe4lhost",
)  # fmt: skip
FOREIGN = ("evil.example", "localhost.evil.example", "[2001:db8::1]", "10.0.0.1:80")
OWN = ("localhost", "LOCALHOST:1".lower(), "127.0.0.1:8080", "[::1]:8080", "127.0.0.9")


def ask(address, host):
    with connect(address) as line:
        named = request(GOOD).replace(b"localhost", host.encode("latin-1"))
        line.sendall(named)
        line.shutdown(socket.SHUT_WR)
        return int(read(line).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")[9:12])


@pytest.mark.parametrize("host", [*MALFORMED, *FOREIGN])
def test_other_hosts_are_refused(address, host):
    assert ask(address, host) == 400


@pytest.mark.parametrize("host", OWN)
def test_local_hosts_are_answered(address, host):
    assert ask(address, host) == 200


def test_a_request_without_a_host_is_refused(address):
    with connect(address) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read(line).startswith(b"HTTP/1.1 400 ")


def test_hosts_are_parsed():
    assert [host_name(host) for host in MALFORMED] == [None] * len(MALFORMED)
    assert host_name("robot.local:80") == "robot.local"
    assert host_name("[::1]") == "::1"


@pytest.mark.parametrize("key", ["", " key", "a key", "key\n", "schlüssel"])
@pytest.mark.parametrize("by_environment", [False, True])
def test_keys_that_nobody_could_send(tmp_path, key, by_environment):
    """They are refused before anything is loaded: there is no bundle here."""
    command = ["serve", str(tmp_path), "--port", "0"]
    environment = {"JETDRAFT_API_KEY": key} if by_environment else {}
    given = [] if by_environment else ["--api-key", key]
    result = CliRunner(env={**os.environ, **environment}).invoke(main, command + given)
    assert_refused(result, "the API key")
