"""The power of a Jetson's rails, from its INA3221 monitors through sysfs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MONITORS = "sys/bus/i2c/drivers/ina3221"
TOTALS = ("VDD_IN", "VIN_SYS_5V0", "VIN")
"""Names of rails that feed the whole module; other rails feed parts of it."""


@dataclass(frozen=True)
class Rail:
    """A measured rail: files with millivolts and milliamperes."""

    name: str
    volts: Path
    amperes: Path

    def watts(self) -> float:
        """The power now; raises `OSError` or `ValueError` if it cannot be read."""
        return int(self.volts.read_text()) * int(self.amperes.read_text()) * 1e-6


def rails(root: Path = Path("/")) -> list[Rail]:
    """All measured rails; none on a machine without the monitors."""
    measured = []
    for label in sorted((root / MONITORS).glob("*/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        folder = label.parent
        volts, amperes = folder / f"in{number}_input", folder / f"curr{number}_input"
        if volts.is_file() and amperes.is_file():
            measured.append(Rail(label.read_text().strip(), volts, amperes))
    return measured


def totals(root: Path = Path("/")) -> list[Rail]:
    """The rails whose sum is the module's power: the rail that feeds it, or all."""
    measured = rails(root)
    return [rail for rail in measured if rail.name in TOTALS][:1] or measured
