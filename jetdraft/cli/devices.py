"""jetdraft devices: the profiles there are, and what this machine is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.devices.detection import Machine, detect
from jetdraft.devices.device import Device


@click.command("devices")
@click.argument("name", required=False)
@click.option("--root", default="/", hidden=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(name: str | None, root: Path, as_json: bool) -> None:
    """List the devices that jetdraft knows, or show all of NAME's profile."""
    if name is not None:
        _show(Device.named(name), as_json)
        return
    known = [Device.named(each) for each in Device.names()]
    machine = detect(root)
    if as_json:
        found = {"devices": [asdict(d) for d in known], "machine": _fields(machine)}
        click.echo(json.dumps(found))
        return
    for device in sorted(known, key=lambda d: d.memory_gb):
        mode = device.power_mode()
        click.echo(
            f"{device.name:14} {device.title:24} sm {device.compute_capability:5}"
            f"{device.memory_gb:5.0f} GB {mode.bandwidth_gbs:6.1f} GB/s "
            f"{mode.fp16_tflops:6.1f} TFLOPS fp16"
        )
    board = machine.board or "not a Jetson"
    known_as = "" if machine.device is None else f", {machine.device.name}"
    click.echo(f"this machine: {board}{known_as}")


def _fields(machine: Machine) -> dict[str, object]:
    found = asdict(machine)
    found["device"] = None if machine.device is None else machine.device.name
    return found


def _show(device: Device, as_json: bool) -> None:
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
