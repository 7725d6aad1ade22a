"""jetdraft tune: what passes and proposers cost on this machine."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.cli.options import bundle_argument, picture, runtime_options
from jetdraft.errors import OutputError
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.planning import tuning
from jetdraft.runtime.planning.tuning import Tuning


@click.command("tune")
@bundle_argument
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    callback=picture,
    help="Draw the curves there.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@runtime_options
def command(
    bundle: Path,
    png: Path | None,
    as_json: bool,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
) -> None:
    """Measure pass times by width and every proposer, and keep them in BUNDLE."""
    model = load(bundle, provider, threads, streams, drafter_provider=drafter_provider)
    with click.progressbar(
        length=tuning.steps(model.planner.proposers),
        label="tune",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as bar:
        found = model.tune(tick=lambda: bar.update(1))
    if as_json:
        fields = {"machine": model.machine(), "tuning": asdict(found)}
        click.echo(json.dumps(fields))
    else:
        _show(model, found)
    if png is not None:
        _draw(found, png)


def _show(model: Model, found: Tuning) -> None:
    exact = model.planner.calibration.exact_widths
    click.echo("rows   chain ms   tree ms   ms per row")
    for width, ms in found.chain_ms.items():
        tree = found.tree_ms.get(width)
        shown = "       -" if tree is None else f"{tree:8.3f}"
        note = "" if width > max(exact) or width in exact else "   not exact"
        click.echo(f"{width:4} {ms:10.3f} {shown:>9} {ms / width:12.3f}{note}")
    for name, ms in found.draft_ms.items():
        click.echo(f"{name:10} {ms:8.4f} ms per drafted token")
    click.echo(f"compaction {found.compaction_ms:8.4f} ms")


def _draw(found: Tuning, png: Path) -> None:
    try:
        drawn = tuning.draw(found, png)
    except OSError as error:
        raise OutputError(
            f"cannot write {png} ({error.strerror}); choose another file"
        ) from error
    if not drawn:
        click.echo("no curve was drawn: pip install matplotlib", err=True)
