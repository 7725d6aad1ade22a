"""What the service manager is told: that the server is ready, alive, or stopping."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Systemd:
    """The service manager of this process, as sd_notify(3) has it.

    `watchdog_seconds` is None if nobody expects to hear that the process is alive.
    Without a service manager `tell` does nothing.

        Systemd(os.environ).tell("READY=1")
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = _watchdog_seconds(environment)

    def tell(self, state: str) -> None:
        """Send one assignment; a manager that does not listen is no reason to end."""
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
