"""jetdraft doctor: this machine's faults, and the devices that jetdraft knows."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from jetdraft.cli.command import Command, option
from jetdraft.cli.flags import PATH, json_option
from jetdraft.devices.detection import Machine, detect_machine
from jetdraft.devices.device import Device
from jetdraft.devices.providers import PROVIDERS, Presence, try_provider
from jetdraft.errors import CheckError, ProviderError
from jetdraft.native import isa
from jetdraft.ort import ort

LEAST_FREE_MB = 1000.0  # 10^6 bytes; below this, `examine` gives a fix.
OLDEST_ORT = (1, 29)  # The oldest version of onnxruntime that jetdraft runs with.


@click.command("doctor", cls=Command)
@option(
    "device --devices",
    "List the devices that jetdraft knows, and name this machine.",
    is_flag=True,
)
@option("device --device", "Print the profile of this device.")
@option(
    "device --root",
    "Examine the machine whose files are below this folder.",
    default="/",
    hidden=True,
    type=PATH,
)
@json_option
def command(devices: bool, device: str | None, root: Path, as_json: bool) -> None:
    """Examine driver, onnxruntime, providers, memory, power mode and clocks."""
    if devices and device is not None:
        raise click.UsageError("give either --devices or --device")
    if devices:
        _print_devices(detect_machine(root), as_json)
    elif device is not None:
        _print_profile(Device.named(device), as_json)
    else:
        findings = examine(root)
        if as_json:
            click.echo(json.dumps({"findings": [*map(asdict, findings)]}))
        for finding in () if as_json else findings:
            click.echo(f"{finding.what:18} {finding.found}")
            if finding.fix:
                click.echo(f"{'':18} -> {finding.fix}")
        for wrong in (finding for finding in findings if finding.wrong):
            raise CheckError(f"{wrong.what}: {wrong.found}; {wrong.fix}")


def _print_devices(machine: Machine, as_json: bool) -> None:
    devices = [Device.named(name) for name in Device.names()]
    name = None if machine.device is None else machine.device.name
    if as_json:
        here = {**asdict(machine), "device": name}
        fields = {"devices": [asdict(device) for device in devices], "machine": here}
        click.echo(json.dumps(fields))
        return
    for device in sorted(devices, key=lambda device: device.memory_gb):
        mode, gpu = device.power_mode(), device.compute_capability
        rate = f"{mode.fp16_tflops:6.1f} TFLOPS fp16, sm {gpu}" if gpu else "  CPU"
        click.echo(
            f"{device.name:19}{device.title:26}{device.memory_gb:5.0f} GB "
            f"{mode.bandwidth_gbs:6.1f} GB/s{rate}"
        )
    board = machine.board or "not a Jetson"
    click.echo(f"this machine: {board}" + (f", {name}" if name else ""))


def _print_profile(device: Device, as_json: bool) -> None:
    fields = asdict(device)
    if as_json:
        click.echo(json.dumps(fields))
        return
    for name, value in fields.items():
        for row in value if isinstance(value, tuple) else [value] * bool(value):
            words = row.items() if isinstance(row, dict) else [("", row)]
            shown = ", ".join(f"{key} {own}".strip() for key, own in words if own)
            click.echo(f"{name:19} {shown}")


@dataclass(frozen=True)
class Finding:
    """What was found: if `wrong`, jetdraft cannot run; another `fix` gives speed."""

    what: str
    found: str
    fix: str = ""
    wrong: bool = False


def examine(
    root: Path = Path("/"), presence_of: Callable[[str], Presence] = try_provider
) -> list[Finding]:
    """Return all findings in the order in which to fix them, wrong findings first."""
    machine = detect_machine(root)
    parts = tuple(int(part) for part in ort.__version__.split(".")[:2])
    fix = "" if parts >= OLDEST_ORT else "pip install 'onnxruntime>=1.29'"
    findings = [Finding("onnxruntime", ort.__version__, fix, wrong=bool(fix))]
    try:
        findings.append(Finding("products", isa()))
    except ProviderError as error:
        found, _, fix = str(error).rpartition("; ")
        findings.append(Finding("products", found, fix))
    findings += [*_check_system(machine), *_check_state(machine)]
    findings += [_check_provider(presence_of(n), machine) for n in reversed(PROVIDERS)]
    return sorted(findings, key=lambda finding: (not finding.wrong, not finding.fix))


def _check_system(machine: Machine) -> Iterator[Finding]:
    if machine.board is None:
        yield Finding("board", "not a Jetson")
        yield Finding("gpu", machine.gpu or "no NVIDIA driver is loaded")
        return
    fix = "" if machine.device else "name the device with --device; report this board"
    profile = f" ({machine.device.name})" if machine.device else ", without a profile"
    yield Finding("board", machine.board + profile, fix)
    if machine.l4t is None:
        if "nvidia" in machine.board.lower():
            fix = "flash JetPack 6.2 or 7.2"
            yield Finding("driver", "no L4T release file", fix, wrong=True)
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


def _check_state(machine: Machine) -> Iterator[Finding]:
    if machine.available_mb is not None:
        is_little = machine.available_mb < LEAST_FREE_MB
        fix = "close other programs, or boot without a desktop" if is_little else ""
        total = f" of {machine.memory_mb:.0f}" if machine.memory_mb else ""
        yield Finding("free memory", f"{machine.available_mb:.0f}{total} MB", fix)
    if machine.board is None:
        return
    if machine.swap_mb is not None:
        fix = "" if machine.swap_mb else "add a swap file; exports need swap"
        yield Finding("swap", f"{machine.swap_mb:.0f} MB", fix)
    mode, fix = machine.power_mode or "unknown", ""
    if machine.power_mode is not None and machine.device is not None:
        fastest = machine.device.power_modes[-1].name
        fix = "" if mode == fastest else f"{fastest} is faster: sudo nvpmodel"
    yield Finding("power mode", mode, fix)
    if machine.gpu_mhz is not None and machine.gpu_max_mhz is not None:
        is_slow = machine.gpu_mhz < machine.gpu_max_mhz
        fix = "for steady figures: sudo jetson_clocks" if is_slow else ""
        clocks = f"{machine.gpu_mhz:.0f} of {machine.gpu_max_mhz:.0f} MHz"
        yield Finding("gpu clock", clocks, fix)


def _check_provider(state: Presence, machine: Machine) -> Finding:
    """Return a finding about a provider, with a fix if this machine may run it."""
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
    kind = next((kind for kind in _PROVIDER_FIXES if kind in state.reason), "")
    is_useless = kind in ("libvulkan", "Vulkan") and not may_have_gpu
    may_run = (machine.board is not None or state.compiled) and not is_useless
    return Finding(what, state.reason, _PROVIDER_FIXES.get(kind, "") if may_run else "")


# What to do, by words in the reason why a provider cannot run; the first counts.
_PROVIDER_FIXES = {
    "plug-in": "pip install --upgrade 'jetdraft[webgpu]'",
    "libvulkan": "apt install libvulkan1",
    "Vulkan": "install the GPU's driver: deploy/jetson",
    "no code": "build onnxruntime for it: deploy/jetson",
    "needs": "install that library, or put its folder into LD_LIBRARY_PATH",
    "driver": "install a newer driver, or an older build",
    "without": "install a build that has it: deploy/jetson",
}
