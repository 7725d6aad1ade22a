"""Compares the bytes, time and quality of quantization recipes of a checkpoint.

python -m tools.recipes TARGET --drafter DRAFTER --output report.json
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from jetdraft.cli import StandaloneCommand
from jetdraft.cli.command import keyword_flags, option
from jetdraft.cli.console import ProgressBars
from jetdraft.cli.flags import (
    PATH,
    check_new_file,
    json_option,
    report_option,
    write_json,
)
from jetdraft.errors import OptionError
from jetdraft.recipe import Recipe
from jetdraft.runtime.passes.opener import LoadOptions
from tools.recipes import report as reports
from tools.recipes.bars import bars
from tools.recipes.picture import draw_points

COMPARED = (
    "int8-rtn-b32",
    "q8_0",
    "q4_k",
    "int8-gptq-b32",
    "int4-rtn-b32",
    "int4-k_quant-b32",
    "int4-hqq-b32",
    "int4-gptq-b32",
    "int4-gptq-b64",
    "int4-rtn-b128",
    "int4-gptq-b128",
    "int4-gptq-b128-head8",
    "int2-gptq-b32-head4",
)
"""The recipes that are compared by default."""

COMPARED_DRAFTERS = ("int8-rtn-b32", "int4-rtn-b32", "int4-gptq-b32")

ALL = "all"


@click.command("recipes", cls=StandaloneCommand)
@click.argument("target")
@option(
    "checkpoint --drafter",
    "A drafter; measures the acceptance and speed of the pair too.",
)
@option(
    "quantization --recipes",
    "Comma list of recipes, for example int4-rtn-b32,int4-gptq-b64; or all.",
    default=ALL,
)
@option(
    "quantization --drafter-recipes",
    "Comma list of the drafter's recipes, or all; each is paired with each "
    "recipe of the target.",
    default=ALL,
)
@option(
    "quantization --calibration",
    "A text for recipes with gptq or kv8; default: a text of the unquantized target.",
    type=PATH,
)
@option(
    "measurement --text",
    "A text to measure on; default: a text of the unquantized target.",
    type=PATH,
)
@keyword_flags(LoadOptions, only=("threads",))
@json_option
@report_option
@option(
    "output --picture",
    "Draw bytes and speed-up over the KL divergence as a PNG; needs matplotlib.",
    metavar="FILE",
    type=PATH,
    callback=lambda context, param, value: _new_picture(value),
)
def main(
    target: str,
    drafter: str | None,
    recipes: str,
    drafter_recipes: str,
    text: Path | None,
    calibration: Path | None,
    as_json: bool,
    output: Path | None,
    picture: Path | None,
    threads: int | None,
) -> None:
    """Quantize TARGET, a checkpoint folder or hub id, with each recipe; compare."""
    target_recipes = _parse(recipes, COMPARED)
    parsed_drafter_recipes = _parse(drafter_recipes, COMPARED_DRAFTERS)
    for file in (text, calibration):
        _check_text(file)
    if drafter is None and drafter_recipes != ALL:
        raise OptionError("--drafter-recipes needs a drafter; give --drafter too")
    # Not in /tmp, which may be memory: the bundles of a large target would fill it.
    folder = (output or Path("report")).absolute().parent
    with TemporaryDirectory(prefix=".jetdraft-recipes-", dir=folder) as work:
        comparison = reports.RecipeComparison(
            target,
            drafter,
            target_recipes,
            parsed_drafter_recipes,
            Path(work),
            text,
            calibration,
            threads,
        )
        done = itertools.count()
        with ProgressBars() as progress:
            report = comparison.run(
                lambda name: progress(f"measure {name}", next(done), comparison.steps)
            )
    if output is not None:
        write_json(output, asdict(report))
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        _show(report)
    if picture is not None:
        label = "mean KL to the unquantized model, nats per token"
        draw_points(picture, reports.panels(report), label)


def _parse(names: str, all_names: tuple[str, ...]) -> list[Recipe]:
    """Parse a comma list, without duplicates and "none", which is always measured."""
    listed = all_names if names == ALL else names.split(",")
    recipes = dict.fromkeys(Recipe.parse(name) for name in listed)
    return [recipe for recipe in recipes if recipe.name != "none"]


def _new_picture(value: Path | None) -> Path | None:
    """Refuse a bad place, or no matplotlib, before the work."""
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("a picture needs matplotlib; pip install matplotlib")
    value = check_new_file(value)
    if value is not None and value.exists():
        with value.open("rb") as handle:
            if handle.read(8) not in (b"", b"\x89PNG\r\n\x1a\n"):
                raise click.BadParameter(f"{value} holds no picture; choose another")
    return value


def _check_text(file: Path | None) -> None:
    if file is not None and not file.is_file():
        raise OptionError(f"no file at {file}; give a text")
    if file is not None and not file.read_bytes().strip():
        raise OptionError(f"{file} has no text in it; give another file")


def _show(report: Any) -> None:
    """Print a table of recipes, a table of pairs, and the answers in short."""
    click.echo(f"measured on {report.text}")
    click.echo(
        "recipe                  MB   RSS MB  KL mean   KL p99   top-1  perplexity  "
        "ms at 1, 2, 4, 8, and against fp32 at 1 and 4"
    )
    for row in report.rows:
        times = " ".join(f"{ms:7.2f}" for ms in row.pass_ms.values())
        click.echo(
            f"{row.recipe:21} {row.bytes / 1e6:5.1f} {row.resident_mb:8.0f} "
            f"{row.kl_mean:8.5f} {row.kl_p99:8.4f} {row.top1_agreement:7.4f} "
            f"{row.perplexity:11.3f}  {times}  {row.relative[1]:.2f}x "
            f"{row.relative[4]:.2f}x"
        )
    if report.pairs:
        click.echo("target                drafter        accepted  tokens/s  speed-up")
    for pair in report.pairs:
        click.echo(
            f"{pair.target:21} {pair.drafter:14} {pair.acceptance_rate:8.3f} "
            f"{pair.tokens_per_second:9.1f} {pair.speedup:8.2f}x"
        )
    for line in bars(report):
        click.echo(line)


if __name__ == "__main__":
    main()
