"""jetdraft quantize: what every recipe costs and gives, measured on a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from jetdraft.cli.options import optional
from jetdraft.errors import OptionError, OutputError
from jetdraft.recipe import COMPARED, COMPARED_DRAFTERS, Recipe


@click.command("quantize")
@click.argument("target")
@click.option("--drafter", help="Measure the acceptance and speed of the pair too.")
@click.option(
    "--recipes",
    default="all",
    show_default=True,
    help="A comma list, as int4-rtn-b32,int4-gptq-b64, or all.",
)
@click.option(
    "--drafter-recipes",
    default="all",
    show_default=True,
    help="Those of the drafter; each is paired with each of the target.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="Measure on it; default: what the unquantized target writes.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="A text for gptq and kv8; default: what the unquantized target writes.",
)
@click.option(
    "--report",
    "output",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write report.json and a picture to.",
)
@click.option("--threads", type=int, help="Threads of the target; default: all cores.")
def command(
    target: str,
    drafter: str | None,
    recipes: str,
    drafter_recipes: str,
    text: Path | None,
    calibration: Path | None,
    output: Path,
    threads: int | None,
) -> None:
    """Quantize TARGET, a checkpoint folder or hub id, in every way, and compare."""
    own = _recipes(recipes, COMPARED)
    beside = _recipes(drafter_recipes, COMPARED_DRAFTERS)
    for file in (text, calibration):
        if file is not None and not file.is_file():
            raise OptionError(f"no file at {file}; give a text")
        if file is not None and not file.read_bytes().strip():
            raise OptionError(f"{file} has no text in it; give another")
    if drafter is None and drafter_recipes != "all":
        raise OptionError("recipes of a drafter need one; give --drafter too")
    _check(output)
    report = optional("quant.report", "quantizing", "export")
    # Beside the report: bundles of a large target would fill a /tmp in memory.
    beside_it = output.absolute().parent
    with TemporaryDirectory(prefix=".jetdraft-quantize-", dir=beside_it) as work:
        found = report.Comparison(
            target, drafter, own, beside, Path(work), text, calibration, threads
        ).run(_say)
    output.mkdir(parents=True, exist_ok=True)
    found.write(output)
    _show(found)
    for line in optional("quant.bars", "quantizing", "export").bars(found):
        click.echo(line)
    if not report.draw(found, output / "front.png"):
        click.echo("no picture was drawn: pip install matplotlib", err=True)


def _say(what: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"measuring {what}", err=True)


def _recipes(names: str, known: tuple[str, ...]) -> list[Recipe]:
    """Each once, and not the unquantized one, which is always measured."""
    found = known if names == "all" else names.split(",")
    recipes = dict.fromkeys(Recipe.parse(name) for name in found)
    return [recipe for recipe in recipes if recipe.name != "none"]


def _check(output: Path) -> None:
    """A folder that is free, or one that an earlier report is in."""
    earlier = (output / "report.json").is_file()
    if output.exists() and not earlier and not output.is_dir():
        raise OutputError(f"{output} is not a folder; choose another")
    if output.is_dir() and not earlier and any(output.iterdir()):
        raise OutputError(f"{output} exists and holds no report; choose another folder")
    if not output.absolute().parent.is_dir():
        raise OutputError(f"{output.parent} is not there; make it, or choose another")


def _show(found: Any) -> None:
    click.echo(f"on {found.text}")
    click.echo(
        "recipe                  MB   RSS MB  KL mean   KL p99   top-1  perplexity  "
        "ms at 1, 2, 4, 8, and against fp32 at 1 and 4"
    )
    for row in found.rows:
        times = " ".join(f"{ms:7.2f}" for ms in row.pass_ms.values())
        click.echo(
            f"{row.recipe:21} {row.bytes / 1e6:5.1f} {row.resident_mb:8.0f} "
            f"{row.kl_mean:8.5f} {row.kl_p99:8.4f} {row.top1_agreement:7.4f} "
            f"{row.perplexity:11.3f}  {times}  {row.relative[1]:.2f}x "
            f"{row.relative[4]:.2f}x"
        )
    if found.pairs:
        click.echo("target                drafter        accepted  tokens/s  speed-up")
    for pair in found.pairs:
        click.echo(
            f"{pair.target:21} {pair.drafter:14} {pair.acceptance_rate:8.3f} "
            f"{pair.tokens_per_second:9.1f} {pair.speedup:8.2f}x"
        )
