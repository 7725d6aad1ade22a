"""jetdraft tune: measures the times of passes and proposers on this machine."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.bench.tuning import count_steps, tune
from jetdraft.cli.command import Command
from jetdraft.cli.console import ProgressBars
from jetdraft.cli.flags import bundle_argument, json_option, runtime_options
from jetdraft.files import check_writable
from jetdraft.runtime.measured.cost_model import Curve
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.opener import LoadOptions


@click.command("tune", cls=Command)
@bundle_argument
@runtime_options()
@json_option
def command(bundle: Path, as_json: bool, runtime: LoadOptions) -> None:
    """Measure pass times by width and every proposer, and keep them in BUNDLE."""
    model = load(bundle, **runtime)
    check_writable(model.parts.profiles.tuning_file)
    with ProgressBars() as bars:
        curve = tune(model, bars.start_stage("tune", count_steps(model)))
    if as_json:
        machine = model.parts.profiles.machine
        click.echo(json.dumps({"machine": machine, "curve": asdict(curve)}))
    else:
        _print_curve(model, curve)


def _print_curve(model: Model, curve: Curve) -> None:
    exact = model.parts.widths.exact
    click.echo("rows   chain ms   tree ms   ms per row")
    for width, ms in curve.passes.items():
        tree = curve.trees.get(width)
        tree_text = "       -" if tree is None else f"{tree:8.3f}"
        note = "" if width > max(exact) or width in exact else "   not exact"
        click.echo(f"{width:4} {ms:10.3f} {tree_text:>9} {ms / width:12.3f}{note}")
    for name, ms in curve.drafts.items():
        click.echo(f"{name:10} {ms:8.4f} ms per drafted token")
    click.echo(f"compaction {curve.compaction:8.4f} ms")
