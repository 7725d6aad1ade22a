"""jetdraft plan: what a model would do on a device that is not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.options import picture
from jetdraft.devices.device import Device
from jetdraft.devices.plan import (
    DRAFTER,
    FREE,
    PROBES,
    Choice,
    MethodCost,
    Plan,
    Question,
    plan,
    refusal,
)
from jetdraft.errors import OptionError, OutputError

PLOTTED = (0.4, 0.6, 0.8)
METHODS = (
    MethodCost("draft", DRAFTER, trees=True),
    MethodCost("stream", PROBES, trees=True),
    MethodCost("lookup", FREE, trees=False),
)
NOTES = {
    PROBES: "for a target that jetdraft train streams has taught it",
    FREE: "where the text repeats itself that often: it drafts nothing else",
}
"""What the acceptance of a method means, by its cost."""


@click.command("plan")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--drafter", type=click.Path(path_type=Path), help="Its config.json.")
@click.option("--device", required=True, help="A name that jetdraft devices lists.")
@click.option("--power-mode", help="Default: the device's first, without Super.")
@click.option("--quantize", "quantization", default="int4", show_default=True)
@click.option("--context", default=2048, show_default=True, help="Tokens kept.")
@click.option(
    "--acceptance",
    default=0.6,
    show_default=True,
    help="How often a first guess is right.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    callback=picture,
    help="Write a picture: tokens per second over width for three acceptances.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    target: Path,
    drafter: Path | None,
    device: str,
    power_mode: str | None,
    quantization: str,
    context: int,
    acceptance: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Predict memory and speed of TARGET, a config.json or its folder."""
    question = Question(
        target,
        Device.named(device),
        drafter,
        quantization,
        context,
        acceptance,
        power_mode,
        METHODS,
    )
    if plot is not None:
        _matplotlib()
    found = plan(question)
    if as_json:
        click.echo(json.dumps(found.to_json()))
    if not found.fits:
        raise refusal(question, found)
    if not as_json:
        _show(found, question.device)
    if plot is not None:
        _draw(question, plot)


def _show(found: Plan, device: Device) -> None:
    parts = " + ".join(f"{name} {mb:.0f}" for name, mb in found.memory_mb.items())
    click.echo(f"device     {found.device}, {found.power_mode}")
    click.echo(
        f"memory     {found.needed_mb:.0f} MB of {found.available_mb:.0f} ({parts})"
    )
    plain = found.rows[0].tokens_per_second
    click.echo(f"plain      {plain:.1f} tokens/s, predicted")
    click.echo("rows       " + "".join(f"{w:7}" for w in found.pass_ms_by_width))
    times = "".join(f"{ms:7.1f}" for ms in found.pass_ms_by_width.values())
    click.echo("ms         " + times)
    click.echo(f"at acceptance {found.acceptance}:")
    methods = dict.fromkeys((row.method, row.shape) for row in found.rows)
    for method, shape in methods:
        same = [r for r in found.rows if (r.method, r.shape) == (method, shape)]
        click.echo(_line(max(same, key=lambda row: row.tokens_per_second)))
    click.echo("best:")
    click.echo(_line(found.best))
    for method, cost in dict.fromkeys((row.method, row.cost) for row in found.rows):
        if cost in NOTES:
            click.echo(f"  ({method}: {NOTES[cost]})")
    others = [mode.name for mode in device.power_modes if mode.name != found.power_mode]
    if others:
        click.echo(f"  (--power-mode {', '.join(others)}: other rates)")


def _line(choice: Choice) -> str:
    return (
        f"  {choice.method:7} {choice.shape:5} {choice.width:3} rows "
        f"{choice.tokens_per_pass:6.2f} tokens/pass {choice.tokens_per_second:7.1f} "
        f"tokens/s {choice.speedup:5.2f}x"
    )


def _matplotlib() -> Any:
    """Its figure, which does without a screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError("--plot needs matplotlib; pip install matplotlib") from error
    return Figure


def _draw(question: Question, file: Path) -> None:
    figure = _matplotlib()(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for acceptance in PLOTTED:
        rows = plan(replace(question, acceptance=acceptance)).rows
        widths = sorted({row.width for row in rows})
        best = [
            max(row.tokens_per_second for row in rows if row.width == width)
            for width in widths
        ]
        axes.plot(widths, best, marker=".", label=f"acceptance {acceptance}")
    axes.set(xlabel="rows per pass", ylabel="tokens per second, predicted")
    axes.set_title(f"{question.target} on {question.device.title}")
    axes.legend()
    try:
        figure.savefig(file, format="png")
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot write {file} ({error}); choose another file"
        ) from error
