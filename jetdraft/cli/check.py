"""jetdraft check: what a bundle holds, and whether all its methods give one text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from jetdraft.bench.text_figures import ALL, TextFigures, text_figures
from jetdraft.bench.verification import Comparison, compare_methods
from jetdraft.bundle import Bundle
from jetdraft.cli.command import Command, option
from jetdraft.cli.description import describe
from jetdraft.cli.flags import (
    bundle_argument,
    json_option,
    runtime_options,
    texts_option,
)
from jetdraft.cli.progress import ProgressBars
from jetdraft.errors import CheckError, OptionError
from jetdraft.export.draft_acceptance import TOLERANCE, fallen, measured_again
from jetdraft.runtime.measured.survey import pass_times
from jetdraft.runtime.measured.widths import Widths
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions


@click.command("check", cls=Command)
@bundle_argument
@option(
    "measurement",
    "--run/--no-run",
    default=True,
    show_default=True,
    help="Run the bundle; --no-run only checks its files and prints its manifest.",
)
@texts_option
@runtime_options()
@json_option
def command(
    bundle: Path,
    run: bool,
    texts: tuple[Path, ...],
    runtime: LoadOptions,
    as_json: bool,
) -> None:
    """Check BUNDLE's files and contracts, width classes, and every method's text."""
    checked = Bundle.open(bundle, again=True)
    figures = _text_figures(checked, texts)
    if not run:
        _show_manifest(checked, figures, as_json)
        return
    model = load(bundle, **runtime)
    speed = 1e3 / pass_times(model.parts.target, [1])[1] if figures else 0.0
    with ProgressBars() as bars:
        bars("measure widths", 0, 1)
        model.measure_again()
        bars("measure widths", 1, 1)
    widths = model.parts.widths
    files, graphs = len(model.bundle.files), len(model.bundle.graphs)
    comparisons = []
    if not as_json:
        click.echo(f"files      {files} present, hashes right")
        click.echo(f"contract   {graphs} graphs as declared")
        shown = [f"widths     {line}" for line in _width_lines(widths)]
        for line in (*shown, *_figure_lines(figures, speed)):
            click.echo(line)
    for comparison in compare_methods(model):
        comparisons.append(comparison)
        if not as_json:
            click.echo(f"text       {_text_line(comparison)}")
    acceptance = measured_again(model)
    if acceptance is not None and not as_json:
        click.echo(f"acceptance {_acceptance_line(*acceptance)}")
    if as_json:
        fields = {
            "files": files,
            "graphs": graphs,
            "widths": widths.to_json(),
            "texts": [asdict(comparison) for comparison in comparisons],
            "acceptance": acceptance
            and dict(zip(("exported", "measured"), acceptance, strict=True)),
            "tokenizer": [row.to_json() for row in figures],
            "plain_tokens_per_second": speed or None,
        }
        click.echo(json.dumps(fields))
    if acceptance is not None and fallen(*acceptance):
        _warn_of_acceptance(*acceptance)
    wrong = sum(one.first_difference is not None for one in comparisons)
    if wrong:
        raise CheckError(
            f"{wrong} methods gave another text than plain decoding; report this with "
            "the output of jetdraft check --no-run"
        )
    if not as_json:
        click.echo(f"verdict    pass: {len(comparisons)} texts as by plain decoding")


def _text_figures(bundle: Bundle, texts: Sequence[Path]) -> list[TextFigures]:
    """What the bundle's tokenizer makes of these texts; raises `OptionError`."""
    if not texts:
        return []
    if bundle.tokenizer is None:
        raise OptionError("the bundle has no tokenizer; leave --tokenize out")
    ids = None if bundle.drafter is None else bundle.draft_vocabulary()
    vocabulary = None if ids is None else frozenset(ids.tolist())
    return text_figures(bundle.tokenizer, texts, vocabulary)


def _figure_lines(figures: Sequence[TextFigures], speed: float) -> Iterator[str]:
    """The rows of all texts, and the speed of plain decoding if it was measured."""
    for row in figures:
        yield f"tokenizer  {row.line()}"
    for row in figures:
        if speed and row.script == ALL:
            yield (
                f"plain      {row.text:16} {speed:.1f} tokens/s, "
                f"{speed * row.characters_per_token:.1f} characters/s"
            )


def _show_manifest(
    bundle: Bundle, figures: Sequence[TextFigures], as_json: bool
) -> None:
    if as_json:
        rows = {"tokenizer": [row.to_json() for row in figures]} if figures else {}
        click.echo(json.dumps(bundle.to_json() | rows, indent=2))
        return
    click.echo(describe(bundle))
    for line in _figure_lines(figures, 0.0):
        click.echo(line)


def _width_lines(widths: Widths) -> Iterator[str]:
    """Describe the classes of widths, and their distance from the exact class."""
    for group in widths.classes:
        span = f"{group[0]}" if len(group) == 1 else f"{group[0]}..{group[-1]}"
        if group != list(range(group[0], group[-1] + 1)):
            span = ", ".join(map(str, group))
        gap = max(widths.gaps[width] for width in group)
        kind = "exact"
        if group != widths.exact:
            kind = f"left out when exact: another kernel rounds, logits by {gap:.1e}"
        yield f"{span:9} {kind}"
    if not widths.trees_agree:
        yield (
            "passes that branch round otherwise than chains: an exact generation does "
            "not branch; --no-exact does"
        )
    if not widths.probes_agree:
        yield (
            "probes change the last bits of the rows beside them: an exact generation "
            "has no probes; --no-exact has"
        )
    if len(widths.exact) == 1:
        yield (
            "no two widths agree bit by bit: an exact generation cannot draft here; "
            "--no-exact can"
        )


def _warn_of_acceptance(exported: list[float], measured: list[float]) -> None:
    click.echo(
        f"warning: the target accepts fewer drafted tokens than at export, by more "
        f"than {TOLERANCE}: {_acceptance_line(exported, measured)}; export the drafter "
        "again, or choose another provider for it",
        err=True,
    )


def _acceptance_line(exported: list[float], measured: list[float]) -> str:
    """The shares by the position in a draft."""
    now, before = (
        " ".join(f"{share:.2f}" for share in shares) for shares in (measured, exported)
    )
    return f"by position {now}, at export {before}"


def _text_line(comparison: Comparison) -> str:
    """Describe one method's text beside the text of plain decoding."""
    name = comparison.method
    if comparison.num_draft_tokens:
        name += f" {comparison.num_draft_tokens}"
    settings = " ".join(f"{k}={v}" for k, v in comparison.settings.items()) or "greedy"
    verdict = f"same {comparison.tokens} tokens"
    if comparison.first_difference is not None:
        verdict = f"differs at token {comparison.first_difference}"
    return f"{name:37} {settings:43} {verdict}"
