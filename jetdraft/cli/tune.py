"""jetdraft tune: the times of passes and proposers on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.bench.picture import draw_curves
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.planning import tuning
from jetdraft.runtime.planning.tuning import Tuning
from jetdraft.terminal.command import Command
from jetdraft.terminal.flags import (
    bundle_argument,
    json_option,
    picture_option,
    runtime_options,
)
from jetdraft.terminal.progress import ProgressBars


@click.command("tune", cls=Command)
@bundle_argument
@runtime_options
@json_option
@picture_option("pass times over the rows of a pass")
def command(
    bundle: Path,
    picture: Path | None,
    as_json: bool,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
) -> None:
    """Measure pass times by width and every proposer, and keep them in BUNDLE."""
    model = load(bundle, provider, threads, streams, drafter_provider=drafter_provider)
    with ProgressBars() as bars:
        times = model.tune(bars.ticks("tune", tuning.steps(model.planner.proposers)))
    if as_json:
        fields = {"machine": model.machine(), "tuning": asdict(times)}
        click.echo(json.dumps(fields))
    else:
        _show(model, times)
    if picture is not None:
        curves = {"chain": times.chain_ms, "tree": times.tree_ms}
        measured = {name: curve for name, curve in curves.items() if curve}
        draw_curves(picture, measured, "rows in a pass", "milliseconds")


def _show(model: Model, times: Tuning) -> None:
    exact = model.planner.calibration.exact_widths
    click.echo("rows   chain ms   tree ms   ms per row")
    for width, ms in times.chain_ms.items():
        tree = times.tree_ms.get(width)
        tree_text = "       -" if tree is None else f"{tree:8.3f}"
        note = "" if width > max(exact) or width in exact else "   not exact"
        click.echo(f"{width:4} {ms:10.3f} {tree_text:>9} {ms / width:12.3f}{note}")
    for name, ms in times.draft_ms.items():
        click.echo(f"{name:10} {ms:8.4f} ms per drafted token")
    click.echo(f"compaction {times.compaction_ms:8.4f} ms")
