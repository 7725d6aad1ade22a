"""What was measured of a bundle on this machine, kept in its `profiles` folder."""

from __future__ import annotations

import hashlib
import platform
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.bundle import Bundle
from jetdraft.devices.detection import detect
from jetdraft.ort import ort
from jetdraft.runtime.measured import widths as calibration
from jetdraft.runtime.measured.widths import Calibration
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.planning import tuning
from jetdraft.runtime.planning.tuning import Tuning


class Profiles:
    """Reads and writes what belongs to a bundle, a provider and a number of threads.

    Where the drafter has another provider both are named: "cuda+cpu".

    Profiles(bundle, "cpu", 2).calibration(target, drafter)
    """

    def __init__(self, bundle: Bundle, provider: str, threads: int) -> None:
        folder, name = bundle.path / "profiles", f"{provider}-{threads}"
        self.calibration_file = folder / f"{name}.json"
        self.tuning_file = folder / f"{name}-tuning.json"
        self.acceptance_file = folder / "acceptance.npz"
        self.machine: dict[str, Any] = {
            "processor": _processor(),
            "features": _features(),
            "provider": provider,
            "threads": threads,
            "onnxruntime": ort.__version__,
            "bundle": bundle.sha256,
        }
        if provider != "cpu":
            self.machine["gpu"] = detect().gpu

    def calibration(
        self, target: Graph, drafter: Graph | None, again: bool = False
    ) -> Calibration:
        """What was measured at an earlier load, or is now."""
        file = self.calibration_file
        found = None if again else calibration.load(file, self.machine)
        if found is None:
            found = calibration.measure(target, drafter)
            calibration.store(file, self.machine, found)
        return found

    def tuning(self) -> Tuning | None:
        """What `jetdraft tune` measured; `ValueError` if on another machine."""
        return tuning.load(self.tuning_file, self.machine)

    def keep_tuning(self, found: Tuning) -> None:
        """Keep it; a folder that cannot be written costs a warning."""
        versions = {"onnxruntime": ort.__version__, "numpy": np.__version__}
        try:
            tuning.store(self.tuning_file, self.machine, versions, found)
        except OSError as error:
            warnings.warn(
                f"the measurement could not be kept in {self.tuning_file} "
                f"({error.strerror})",
                stacklevel=3,
            )


def _processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _features() -> str:
    """A hash of what tells kernels apart: rounding depends on the instructions."""
    told = ("flags", "Features", "cpu family", "model", "stepping", "CPU part")
    found: set[str] = set()
    for file in ("/proc/cpuinfo", "/proc/device-tree/model"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            continue
        names = {line: line.partition(":")[0].strip() for line in lines}
        is_board = file.endswith("model")
        found |= {line for line in lines if is_board or names[line] in told}
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:12]
