"""What a service manager hears."""

import os
import socket
import time

import httpx
import pytest

from jetdraft.server.http_server import Systemd
from tests.server.serving import started

BODY = {"model": "toy", "prompt": "The robot", "max_tokens": 300, "seed": 1,
        "method": "none", "ignore_eos": True}  # fmt: skip


@pytest.fixture
def manager(tmp_path):
    """A socket such as systemd's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(tmp_path / "notify"))
        own.settimeout(60)
        yield own


def heard(manager):
    return manager.recv(100).decode()


def test_readiness_watchdog_and_end(manager, toy, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "1500000")
    with started(toy) as (process, address):
        assert heard(manager) == "READY=1"
        assert httpx.get(f"{address}/health").status_code == 200
        assert [heard(manager) for _ in range(3)] == ["WATCHDOG=1"] * 3
        process.terminate()
        said = heard(manager)
        while said == "WATCHDOG=1":
            said = heard(manager)
        assert said == "STOPPING=1"
        assert process.wait(60) == 0


def test_a_model_that_hangs_is_not_alive(service, address):
    """A text that continues after its end: only a pass that never ends does so."""
    assert service.desk.overdue <= 0

    class Hanging:
        deadline = time.monotonic() - 5.0

    service.desk.jobs.add(Hanging)
    try:
        assert service.desk.overdue >= 5.0
    finally:
        service.desk.jobs.discard(Hanging)


def test_a_hanging_model_silences_the_watchdog(manager, toy, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "300000")
    with started(toy, "--max-seconds", "0.2", slow=20.0) as (_, address):
        assert heard(manager) == "READY=1"
        assert heard(manager) == "WATCHDOG=1"
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{address}/v1/completions", json=BODY, timeout=2.0)
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):  # noqa: PT012
            while True:
                manager.recv(100)
        time.sleep(1.2)
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        assert httpx.get(f"{address}/health").status_code == 200, "the loop is well"


def test_an_abstract_address():
    name = f"\0jetdraft-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(name)
        own.settimeout(60)
        Systemd({"NOTIFY_SOCKET": "@" + name[1:]}).notify("READY=1")
        assert heard(own) == "READY=1"


def test_nobody_listens(tmp_path):
    Systemd({}).notify("READY=1")
    Systemd({"NOTIFY_SOCKET": str(tmp_path / "none")}).notify("READY=1")


def test_whose_watchdog_it_is():
    def seconds(**more):
        return Systemd({"WATCHDOG_USEC": "2000000", **more}).watchdog_seconds

    assert seconds() == 2.0
    assert seconds(WATCHDOG_PID=str(os.getpid())) == 2.0
    assert seconds(WATCHDOG_PID="1") is None
    assert seconds(WATCHDOG_USEC="x") is None
