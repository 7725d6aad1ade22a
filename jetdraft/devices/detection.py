"""Detects this machine: the board, its state and power, and the processor."""

import hashlib
import json
import platform
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jetdraft.devices.device import Device, JetPack


@dataclass(frozen=True)
class Machine:
    """What a machine's files say of it; None for a fact that no file has.

    Memory is in MB of 10^6 bytes, clocks are in MHz. `jetpack` is the release that has
    the L4T version `l4t`. `has_gpu` says whether the kernel shows a GPU of any maker.
    """

    board: str | None
    device: Device | None
    l4t: str | None
    jetpack: JetPack | None
    cuda: str | None
    tensorrt: str | None
    power_mode: str | None
    gpu: str | None
    has_gpu: bool
    memory_mb: float | None
    available_mb: float | None
    swap_mb: float | None
    gpu_mhz: float | None
    gpu_max_mhz: float | None


def detect_machine(root: Path = Path("/")) -> Machine:
    """Read the files of the machine below `root`, which may be a recorded tree."""
    # Part numbers such as "p3767-0000" name the board, or a whole name.
    text = read_text(root / "proc/device-tree/compatible")
    parts = {*re.findall(r"p\d{4}-\d{4}", text), *text.split("\0")}
    devices = map(Device.named, Device.names())
    device = next((one for one in devices if parts & set(one.boards)), None)
    # "36.4.3" from "# R36 (release), REVISION: 4.3"
    text = read_text(root / "etc/nv_tegra_release")
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text)
    l4t = f"{release[1]}.{release[2]}" if release else None
    # A patch of a release differs in the third number: 36.4.4 is one of 36.4.3.
    packs, installed = (device.jetpacks if device else ()), _version_numbers(l4t or "")
    known = [(_version_numbers(pack.l4t), pack) for pack in packs]
    same = (p for l4t, p in known if l4t[:2] == installed[:2] and installed >= l4t)
    text = read_text(root / "proc/meminfo")
    sizes = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    memory = {name: int(kb) * 1.024e-3 for name, kb in sizes}
    cuda = None
    with suppress(ValueError, KeyError, TypeError):
        versions = json.loads(read_text(root / "usr/local/cuda/version.json"))
        cuda = str(versions["cuda"]["version"])
    board = read_text(root / "proc/device-tree/model") or None
    return Machine(
        board=board,
        device=device,
        l4t=l4t,
        jetpack=next(same, None),
        cuda=cuda,
        tensorrt=_tensorrt_version(root),
        power_mode=_power_mode(root),
        gpu=_gpu_name(root, board),
        has_gpu=any(next(root.glob(place), None) for place in _GPU_FILES),
        memory_mb=memory.get("MemTotal"),
        available_mb=memory.get("MemAvailable"),
        swap_mb=memory.get("SwapTotal"),
        gpu_mhz=_gpu_mhz(root, "cur_freq"),
        gpu_max_mhz=_gpu_mhz(root, "max_freq"),
    )


def read_text(file: str | Path, errors: str = "replace") -> str:
    """The text of a file of Linux; "" on other systems, or where a sandbox hides it."""
    try:
        return Path(file).read_text("utf-8", errors).strip("\0\n ")
    except OSError:
        return ""


def _version_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def _tensorrt_version(root: Path) -> str | None:
    places = (f"usr/lib/{name}-linux-gnu" for name in ("aarch64", "x86_64"))
    files = (file for p in places for file in (root / p).glob("libnvinfer.so.*.*"))
    suffixes = (file.name.partition(".so.")[2] for file in files)
    versions = [name for name in suffixes if re.fullmatch(r"\d+(\.\d+)+", name)]
    return max(versions, default=None, key=_version_numbers)


def _power_mode(root: Path) -> str | None:
    mode = re.search(r"pmode:(\d+)", read_text(root / "var/lib/nvpmodel/status"))
    if mode is None:
        return None
    config = read_text(root / "etc/nvpmodel.conf")
    modes = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>", config)
    return {int(number): name for number, name in modes}.get(int(mode[1]))


def _gpu_name(root: Path, board: str | None) -> str | None:
    """The GPU's name and driver version; on a Jetson, the name of the board."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    text = "".join(read_text(file) for file in files[:1])
    name = re.search(r"Model:\s*(.+)", text)
    if name is None:
        return board
    driver = read_text(root / "proc/driver/nvidia/version")
    version = re.search(r"\s(\d+\.\d+[.\d]*)\s", driver)
    return f"{name[1]}, driver {version[1]}" if version else name[1]


# Device files of GPUs: most drivers, NVIDIA's, Jetsons, Windows below Linux.
_GPU_FILES = (
    *("dev/dri/renderD*", "dev/nvidia[0-9]*", "dev/nvgpu", "dev/nvhost-gpu"),
    "dev/dxg",
)


def _gpu_mhz(root: Path, file: str) -> float | None:
    """Return a clock of the GPU in MHz from `file` in its devfreq folder, or None."""
    for folder in sorted((root / "sys/class/devfreq").glob("*gpu*")):
        text = read_text(folder / file)
        if text.isdigit():
            return int(text) / 1e6
    return None


def processor_name() -> str:
    """The name of the processor, or its architecture where the system hides it."""
    for line in read_text("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def processor_digest() -> str:
    """A short hash of the processor's features, which decide how kernels round."""
    used_names = ("flags", "Features", "cpu family", "model", "stepping", "CPU part")
    used_lines: set[str] = set()
    for file in ("/proc/cpuinfo", "/proc/device-tree/model"):
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            continue
        names = {line: line.partition(":")[0].strip() for line in lines}
        is_board = file.endswith("model")
        used_lines |= {line for line in lines if is_board or names[line] in used_names}
    return hashlib.sha256("\n".join(sorted(used_lines)).encode()).hexdigest()[:12]


INTERVAL = 0.05  # The seconds between two readings of a `Meter`.
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


def watts_of(rails: Sequence[Rail]) -> float | None:
    """The power of some rails now in watts; None where a rail cannot be read."""
    try:
        return sum(rail.watts() for rail in rails)
    except (OSError, ValueError):
        return None


class Meter:
    """Measures the energy that its `with` block uses; `joules` is None if it cannot."""

    def __init__(self, root: Path = Path("/"), interval: float = INTERVAL) -> None:
        self.joules: float | None = None
        self._rails = module_rails(root)
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._integrate, daemon=True)

    def __enter__(self) -> "Meter":
        if self._rails:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._rails:
            self._thread.join()

    def _integrate(self) -> None:
        """Add the energy between readings; a vanished rail makes `joules` None."""
        joules, before, watts = 0.0, time.perf_counter(), watts_of(self._rails)
        done = False
        while watts is not None and not done:
            done = self._stop.wait(self._interval)
            now, next_watts = time.perf_counter(), watts_of(self._rails)
            if next_watts is None:
                self.joules = None  # the energy until now would be too little
                return
            joules += (now - before) * (watts + next_watts) / 2
            before, watts = now, next_watts
            self.joules = joules
