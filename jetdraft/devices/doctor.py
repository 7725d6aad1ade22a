"""Examines a machine end to end: what is wrong, and what to do first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jetdraft.devices.detection import Machine, detect
from jetdraft.devices.providers import PROVIDERS, Presence, presence
from jetdraft.ort import ort

LEAST_FREE_MB = 1000.0
OLDEST_ORT = (1, 29)


@dataclass(frozen=True)
class Finding:
    """One fact about the machine: `what` was examined and `found`.

    `fix` is what to do, empty where all is well. A `wrong` finding keeps jetdraft from
    running; other findings with a fix cost speed.
    """

    what: str
    found: str
    fix: str = ""
    wrong: bool = False


def examine(
    root: Path = Path("/"), presence_of: Callable[[str], Presence] = presence
) -> list[Finding]:
    """All findings in the order in which to fix them; the wrong ones come first.

    examine()[0].fix
    """
    machine = detect(root)
    findings = [*_onnxruntime(), *_system(machine), *_state(machine)]
    findings += [_provider(presence_of(name), machine) for name in reversed(PROVIDERS)]
    return sorted(findings, key=lambda finding: (not finding.wrong, not finding.fix))


def _onnxruntime() -> Iterator[Finding]:
    version = ort.__version__
    parts = tuple(int(part) for part in version.split(".")[:2])
    fix = "" if parts >= OLDEST_ORT else "pip install 'onnxruntime>=1.29'"
    yield Finding("onnxruntime", version, fix, wrong=bool(fix))


def _system(machine: Machine) -> Iterator[Finding]:
    if machine.board is None:
        yield Finding("board", "not a Jetson")
        yield Finding("gpu", machine.gpu or "no NVIDIA driver is loaded")
        return
    fix = "" if machine.device else "name the device with --device; report this board"
    profile = f" ({machine.device.name})" if machine.device else ", without a profile"
    yield Finding("board", machine.board + profile, fix)
    if machine.l4t is None:
        yield Finding(
            "driver", "no L4T release file", "flash JetPack 6.2 or 7.2", wrong=True
        )
        return
    release = f"L4T {machine.l4t}"
    if machine.jetpack is None:
        jetpacks = machine.device.jetpacks if machine.device else ()
        versions = " or ".join(pack.version for pack in jetpacks) or "6.2 or 7.2"
        fix = f"jetdraft knows JetPack {versions} on this board; others may work"
        yield Finding("driver", release, fix)
    else:
        yield Finding("driver", f"{release}, JetPack {machine.jetpack.version}")
    cuda = "" if machine.cuda else "install it: apt install nvidia-jetpack"
    yield Finding("cuda", machine.cuda or "not installed", cuda)
    tensorrt = "" if machine.tensorrt else "only --provider tensorrt needs it"
    yield Finding("tensorrt", machine.tensorrt or "not installed", tensorrt)


def _state(machine: Machine) -> Iterator[Finding]:
    if machine.available_mb is not None:
        fix = ""
        if machine.available_mb < LEAST_FREE_MB:
            fix = "close other programs, or boot without a desktop"
        total = f" of {machine.memory_mb:.0f}" if machine.memory_mb else ""
        yield Finding("free memory", f"{machine.available_mb:.0f}{total} MB", fix)
    if machine.board is None:
        return
    if machine.swap_mb is not None:
        fix = "" if machine.swap_mb else "add a swap file; exports need swap"
        yield Finding("swap", f"{machine.swap_mb:.0f} MB", fix)
    yield _power(machine)
    if machine.gpu_mhz is not None and machine.gpu_max_mhz is not None:
        fix = ""
        if machine.gpu_mhz < machine.gpu_max_mhz:
            fix = "for steady figures: sudo jetson_clocks"
        clocks = f"{machine.gpu_mhz:.0f} of {machine.gpu_max_mhz:.0f} MHz"
        yield Finding("gpu clock", clocks, fix)


def _power(machine: Machine) -> Finding:
    """The power mode; the last mode of a profile is the fastest."""
    mode = machine.power_mode
    if mode is None or machine.device is None:
        return Finding("power mode", mode or "unknown")
    fastest = machine.device.power_modes[-1].name
    fix = "" if mode == fastest else f"{fastest} is faster: sudo nvpmodel"
    return Finding("power mode", mode, fix)


def _provider(state: Presence, machine: Machine) -> Finding:
    what = f"provider {state.name}"
    may_have_gpu = machine.has_gpu or machine.board is not None
    if state.software:
        driver = "install the GPU's Vulkan driver, or " if may_have_gpu else ""
        fix = f"for speed, {driver}choose --provider cpu"
        return Finding(what, "runs on a software adapter, which is the CPU", fix)
    if state.runs:
        return Finding(what, "runs")
    if state.name == "cpu":
        return Finding(what, state.reason, "reinstall onnxruntime", wrong=True)
    fix, kind = "", _kind(state.reason)
    is_useless = kind in _DRIVERS and not may_have_gpu
    if (machine.board is not None or state.compiled) and not is_useless:
        fix = {
            "no code": "build onnxruntime for it: deploy/jetson",
            "needs": "install that library, or put its folder into LD_LIBRARY_PATH",
            "driver": "install a newer driver, or an older build",
            "without": "install a build that has it: deploy/jetson",
            "plug-in": "pip install --upgrade 'jetdraft[webgpu]'",
            "Vulkan": "install the GPU's driver: deploy/jetson",
            "libvulkan": "apt install libvulkan1",
        }.get(kind, "")
    return Finding(what, state.reason, fix)


_DRIVERS = ("libvulkan", "Vulkan")
"""Kinds of reasons whose fix helps only where there is a GPU."""


def _kind(reason: str) -> str:
    kinds = ("plug-in", "libvulkan", "Vulkan", "no code", "needs", "driver", "without")
    return next((kind for kind in kinds if kind in reason), "")
