"""Power and energy of a Jetson, from its INA3221 monitors through sysfs."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

INTERVAL_SECONDS = 0.05  # The seconds between two readings of a `Meter`.
MONITORS = "sys/bus/i2c/drivers/ina3221"  # The folder of the power monitors.
MODULE_RAILS = ("VDD_IN", "VIN_SYS_5V0", "VIN")  # They feed the whole module.


@dataclass(frozen=True)
class Rail:
    """A measured rail; its files hold millivolts and milliamperes."""

    name: str
    volts: Path
    amperes: Path

    def watts(self) -> float:
        """The power now in watts; raises `OSError` or `ValueError`."""
        return int(self.volts.read_text()) * int(self.amperes.read_text()) * 1e-6


def rails(root: Path = Path("/")) -> list[Rail]:
    """All measured rails of the machine; [] without monitors."""
    measured = []
    for label in sorted((root / MONITORS).glob("*/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        folder = label.parent
        volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
        if volts.is_file() and amperes.is_file():
            measured.append(Rail(label.read_text().strip(), volts, amperes))
    return measured


def module_rails(root: Path = Path("/")) -> list[Rail]:
    """The rails whose sum is the module's power: the rail that feeds it, or all."""
    measured = rails(root)
    return [rail for rail in measured if rail.name in MODULE_RAILS][:1] or measured


class Meter:
    """Measures the energy that its `with` block uses; `joules` is None if it cannot."""

    def __init__(
        self, root: Path = Path("/"), interval: float = INTERVAL_SECONDS
    ) -> None:
        self.joules: float | None = None
        self._rails = module_rails(root)
        self._interval = interval
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Meter":
        if self._rails:
            self._thread = threading.Thread(target=self._integrate, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _integrate(self) -> None:
        """Add the energy between readings; a vanished rail makes `joules` None."""
        joules, before, watts = 0.0, time.perf_counter(), self._watts()
        done = False
        while watts is not None and not done:
            done = self._stop.wait(self._interval)
            now, next_watts = time.perf_counter(), self._watts()
            if next_watts is None:
                self.joules = None  # the energy until now would be too little
                return
            joules += (now - before) * (watts + next_watts) / 2
            before, watts = now, next_watts
            self.joules = joules

    def _watts(self) -> float | None:
        try:
            return sum(rail.watts() for rail in self._rails)
        except (OSError, ValueError):
            return None
