"""Which board this is and in what state, read from files below a root folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from jetdraft.devices.device import Device, JetPack


@dataclass(frozen=True)
class Machine:
    """What the files say; None where they do not.

    Memory in MB of 10^6 bytes, clocks in MHz. `device` is the profile of the board,
    `jetpack` the release that its L4T belongs to.
    """

    board: str | None
    device: Device | None
    l4t: str | None
    jetpack: JetPack | None
    cuda: str | None
    tensorrt: str | None
    power_mode: str | None
    gpu: str | None
    memory_mb: float | None
    available_mb: float | None
    swap_mb: float | None
    gpu_mhz: float | None
    gpu_max_mhz: float | None


def detect(root: Path = Path("/")) -> Machine:
    """Look at a machine, or at a recorded tree of its files.

    detect().device
    """
    device, l4t = _device(root), _l4t(root)
    board = _text(root / "proc/device-tree/model")
    memory = _memory(root)
    packs = () if device is None else device.jetpacks
    same = (pack for pack in packs if l4t and _same_release(pack.l4t, l4t))
    return Machine(
        board=board,
        device=device,
        l4t=l4t,
        jetpack=next(same, None),
        cuda=_cuda(root),
        tensorrt=_tensorrt(root),
        power_mode=_power_mode(root),
        gpu=_gpu(root, board),
        memory_mb=memory.get("MemTotal"),
        available_mb=memory.get("MemAvailable"),
        swap_mb=memory.get("SwapTotal"),
        gpu_mhz=_gpu_mhz(root, "cur_freq"),
        gpu_max_mhz=_gpu_mhz(root, "max_freq"),
    )


def _text(file: Path) -> str | None:
    """A file's text without the end that device trees and sysfs put there."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return None
    return text or None


def _device(root: Path) -> Device | None:
    """By the part numbers in the device tree: "nvidia,p3768-0000+p3767-0000" ..."""
    said = _text(root / "proc/device-tree/compatible") or ""
    parts = set(re.findall(r"p\d{4}-\d{4}", said))
    for name in Device.names():
        device = Device.named(name)
        if parts & set(device.boards):
            return device
    return None


def _l4t(root: Path) -> str | None:
    """ "36.4.3" out of "# R36 (release), REVISION: 4.3, ..."."""
    said = _text(root / "etc/nv_tegra_release") or ""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", said)
    return f"{found[1]}.{found[2]}" if found else None


def _same_release(known: str, found: str) -> bool:
    """Patches of a release come after it: 36.4.3 is JetPack 6.2, 36.4.0 was 6.1."""
    one, other = _numbers(known), _numbers(found)
    return one[:2] == other[:2] and other >= one


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def _cuda(root: Path) -> str | None:
    text = _text(root / "usr/local/cuda/version.json")
    try:
        version = json.loads(text or "{}")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(version)


def _tensorrt(root: Path) -> str | None:
    """The version in the library's name."""
    found = [
        file.name.partition(".so.")[2]
        for folder in ("usr/lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu")
        for file in (root / folder).glob("libnvinfer.so.*.*")
    ]
    versions = [name for name in found if re.fullmatch(r"\d+(\.\d+)+", name)]
    return max(versions, default=None, key=_numbers)


def _power_mode(root: Path) -> str | None:
    """nvpmodel's status has a number, its configuration the name of it."""
    status = re.search(r"pmode:(\d+)", _text(root / "var/lib/nvpmodel/status") or "")
    if status is None:
        return None
    config = _text(root / "etc/nvpmodel.conf") or ""
    modes = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>", config)
    return {int(number): name for number, name in modes}.get(int(status[1]))


def _gpu(root: Path, board: str | None) -> str | None:
    """Its name and its driver's version; on a Jetson the board decides both."""
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    said = "".join(_text(file) or "" for file in files[:1])
    name = re.search(r"Model:\s*(.+)", said)
    if name is None:
        return board
    driver = _text(root / "proc/driver/nvidia/version") or ""
    version = re.search(r"\s(\d+\.\d+[.\d]*)\s", driver)
    return f"{name[1]}, driver {version[1]}" if version else name[1]


def _memory(root: Path) -> dict[str, float]:
    said = _text(root / "proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s+(\d+) kB", said, re.MULTILINE)
    return {name: int(kb) * 1.024e-3 for name, kb in found}


def _gpu_mhz(root: Path, what: str) -> float | None:
    """From the GPU's devfreq, "17000000.gpu" on Orin, "gpu-gpc-0" on Thor."""
    for folder in sorted((root / "sys/class/devfreq").glob("*gpu*")):
        text = _text(folder / what)
        if text is not None and text.isdigit():
            return int(text) / 1e6
    return None
