"""jetdraft doctor: this machine's faults, and the devices that jetdraft knows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.devices.detection import Machine, detect
from jetdraft.devices.device import Device
from jetdraft.devices.doctor import examine
from jetdraft.errors import CheckError
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.flags import PATH, json_option


@click.command("doctor", cls=Command)
@option(
    "device",
    "--devices",
    is_flag=True,
    help="List the devices that jetdraft knows, and name this machine.",
)
@option("device", "--device", help="Print the profile of this device.")
@option(
    "device",
    "--root",
    default="/",
    hidden=True,
    type=PATH,
    help="Examine the machine whose files are below this folder.",
)
@json_option
def command(devices: bool, device: str | None, root: Path, as_json: bool) -> None:
    """Examine driver, onnxruntime, providers, memory, power mode and clocks."""
    if devices and device is not None:
        raise click.UsageError("give either --devices or --device")
    if devices:
        _show_devices(detect(root), as_json)
    elif device is not None:
        _show_profile(Device.named(device), as_json)
    else:
        _show_findings(root, as_json)


def _show_findings(root: Path, as_json: bool) -> None:
    """Print what is there and how to mend it; raise `CheckError` for a fault."""
    findings = examine(root)
    if as_json:
        fields = [asdict(finding) for finding in findings]
        click.echo(json.dumps({"findings": fields}))
    else:
        for finding in findings:
            click.echo(f"{finding.what:18} {finding.found}")
            if finding.fix:
                click.echo(f"{'':18} -> {finding.fix}")
    wrong = [finding for finding in findings if finding.wrong]
    if wrong:
        raise CheckError(f"{wrong[0].what}: {wrong[0].found}; {wrong[0].fix}")


def _show_devices(machine: Machine, as_json: bool) -> None:
    """Print a line for each device, the smallest memory first."""
    devices = [Device.named(name) for name in Device.names()]
    name = None if machine.device is None else machine.device.name
    if as_json:
        here = {**asdict(machine), "device": name}
        fields = {"devices": [asdict(device) for device in devices], "machine": here}
        click.echo(json.dumps(fields))
        return
    for device in sorted(devices, key=lambda device: device.memory_gb):
        mode = device.power_mode()
        click.echo(
            f"{device.name:14} {device.title:24} sm {device.compute_capability:5}"
            f"{device.memory_gb:5.0f} GB {mode.bandwidth_gbs:6.1f} GB/s "
            f"{mode.fp16_tflops:6.1f} TFLOPS fp16"
        )
    board = machine.board or "not a Jetson"
    click.echo(f"this machine: {board}" + (f", {name}" if name else ""))


def _show_profile(device: Device, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(device)))
        return
    click.echo(f"{device.title} ({device.name})")
    click.echo(f"memory         {device.memory_gb:.0f} GB")
    click.echo(
        f"gpu            sm {device.compute_capability}, {device.cuda_cores} cores in "
        f"{device.multiprocessors} multiprocessors"
    )
    click.echo(f"quantizations  {', '.join(device.quantizations)}")
    click.echo(f"recipe         {device.recipe} ({device.recipe_evidence})")
    for mode in device.power_modes:
        click.echo(
            f"{mode.name:14} {mode.watts:.0f} W, {mode.bandwidth_gbs} GB/s, "
            f"{mode.gpu_mhz:.0f} MHz, {mode.fp16_tflops} TFLOPS dense fp16 "
            f"({mode.source})"
        )
    for pack in device.jetpacks:
        click.echo(
            f"JetPack {pack.version:6} L4T {pack.l4t}, CUDA {pack.cuda}, "
            f"TensorRT {pack.tensorrt}, Python {pack.python}"
        )
    click.echo(f"source         {device.source}")
