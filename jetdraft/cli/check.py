"""jetdraft check: is a bundle whole, and does every method give the same text?"""

from __future__ import annotations

from pathlib import Path

import click

from jetdraft.bench.verification import compare_methods
from jetdraft.cli.options import bundle_argument, runtime_options
from jetdraft.errors import CheckError
from jetdraft.runtime.model import Model, load


@click.command("check")
@bundle_argument
@runtime_options
def command(
    bundle: Path,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
) -> None:
    """Check integrity, contract, width classes and the text of every method."""
    model = load(bundle, provider, threads, streams, drafter_provider=drafter_provider)
    click.echo(f"files      {len(model.bundle.files)} present, hashes right")
    click.echo(f"contract   {len(model.bundle.graphs)} graphs as declared")
    model.planner.calibration = model.calibrate(again=True)
    _show_classes(model)
    wrong = 0
    for result in compare_methods(model):
        name = result.method
        if result.num_draft_tokens:
            name += f" {result.num_draft_tokens}"
        settings = " ".join(f"{k}={v}" for k, v in result.settings.items()) or "greedy"
        verdict = f"same {result.tokens} tokens"
        if result.first_difference is not None:
            verdict, wrong = f"differs at token {result.first_difference}", wrong + 1
        click.echo(f"text       {name:9} {settings:48} {verdict}")
    if wrong:
        raise CheckError(
            f"{wrong} methods gave another text than plain decoding; report this with "
            "the output of jetdraft inspect"
        )


def _show_classes(model: Model) -> None:
    """The classes, and how far the widths outside the exact one are off."""
    found = model.planner.calibration
    for widths in found.classes:
        span = f"{widths[0]}" if len(widths) == 1 else f"{widths[0]}..{widths[-1]}"
        if widths != list(range(widths[0], widths[-1] + 1)):
            span = ", ".join(map(str, widths))
        gap = max(found.gaps[width] for width in widths)
        used = (
            "exact" if widths == found.exact_widths else f"logits differ by {gap:.1e}"
        )
        click.echo(f"widths     {span:9} {used}")
    for agree, what in (
        (found.trees_agree, "passes that branch round otherwise than chains"),
        (found.probes_agree, "probes change the last bits of the rows beside them"),
    ):
        if not agree:
            click.echo(f"widths     {what}: exact generation does without; --no-exact")
    if len(found.exact_widths) == 1:
        click.echo(
            "widths     no two widths agree bit by bit: exact generation cannot draft "
            "here; --no-exact can"
        )
