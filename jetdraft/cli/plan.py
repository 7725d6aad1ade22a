"""jetdraft plan: predicts the memory and speed of a model on another device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jetdraft.bench.text_figures import WHOLE_TEXT, TextFigures, text_figures
from jetdraft.bundle import TOKENIZER
from jetdraft.cli.command import Command, keyword_flags, option
from jetdraft.cli.flags import PATH, json_option, texts_option
from jetdraft.devices.planning.drafter_advice import Advisor, Drafter
from jetdraft.devices.planning.plan import (
    FREE,
    PROBES,
    Choice,
    MethodCost,
    Plan,
    Question,
    does_not_fit_error,
    plan,
)
from jetdraft.runtime.planning.registry import methods

OTHER_BUDGETS = (20, 2000)
"""Training tokens per weight that are shown beside the advised number."""

COST_NOTES = {
    PROBES: "for a target that jetdraft train stream has trained",
    FREE: "for a text that repeats itself that often; it drafts nothing else",
}
"""What the assumed acceptance means for a method, by the cost of its drafts."""

NO_METHODS_LINE = (
    "methods    not predicted: what a further row costs on this CPU was never "
    "measured; on the board: jetdraft tune BUNDLE, jetdraft bench BUNDLE"
)
"""What is printed instead of methods and drafters for the CPU."""


@click.command("plan", cls=Command)
@click.argument("target", type=PATH)
@keyword_flags(Question)
@option(
    "drafting",
    "--draft-vocab",
    type=click.IntRange(1),
    help="Tokens that the advised drafter can draft; default: all. With --tokenize, "
    "how much of it the most frequent tokens cover.",
)
@texts_option
@json_option
def command(
    target: Path,
    draft_vocab: int | None,
    texts: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Predict memory and speed of TARGET, a config.json or the folder with it."""
    question = Question(target, **options, methods=method_costs())
    prediction = plan(question)
    figures = _read_text_figures(target, texts, draft_vocab)
    advice = [] if question.on_cpu else _advise_drafters(question, draft_vocab, figures)
    if as_json:
        fields = prediction.to_json() | {
            "advised_drafters": [drafter.to_json() for drafter in advice],
            "tokenizer": [row.to_json() for row in figures],
        }
        click.echo(json.dumps(fields))
    if not prediction.fits:
        raise does_not_fit_error(question, prediction)
    if not as_json:
        _print_plan(prediction, question)
        if question.on_cpu:
            click.echo(NO_METHODS_LINE)
        else:
            _print_methods(prediction)
            _print_drafters(advice)
        _print_texts(prediction, figures)


def _read_text_figures(
    target: Path, texts: Sequence[Path], draft_vocab: int | None
) -> list[TextFigures]:
    """Count tokens of text files by the target's tokenizer; raises `DataError`."""
    if not texts:
        return []
    folder = target if target.is_dir() else target.parent
    return text_figures(folder / TOKENIZER, texts, most_frequent=draft_vocab)


def _advise_drafters(
    question: Question, draft_vocab: int | None, figures: Sequence[TextFigures]
) -> list[Drafter]:
    """Return the advised drafter, then its shape with each of `OTHER_BUDGETS`."""
    whole = [r for r in figures if r.script == WHOLE_TEXT and r.coverage is not None]
    tokens = sum(r.tokens for r in whole)
    covered = sum(r.tokens * (r.coverage or 0.0) for r in whole)
    coverage = covered / tokens if tokens else 1.0
    advisor = Advisor(question, draft_vocab, coverage)
    best = advisor.best()
    shape = best.layers, best.hidden_size
    return [best, *(advisor.predict(*shape, budget) for budget in OTHER_BUDGETS)]


def method_costs() -> tuple[MethodCost, ...]:
    """The costs of the registered methods that can be predicted on a device."""
    return tuple(
        MethodCost(method.name, method.cost, method.trees)
        for method in methods().values()
        if method.cost is not None
    )


def _print_plan(prediction: Plan, question: Question) -> None:
    """Print what was predicted for, the memory, and the speed of plain decoding."""
    click.echo(f"predicted  {prediction.basis}")
    parts = " + ".join(f"{name} {mb:.0f}" for name, mb in prediction.memory_mb.items())
    click.echo(f"device     {prediction.device}, {prediction.power_mode}")
    click.echo(
        f"memory     {prediction.needed_mb:.0f} MB of {prediction.available_mb:.0f} "
        f"({parts})"
    )
    plain = prediction.rows[0].tokens_per_second
    word = "at most" if question.on_cpu else "about"
    click.echo(f"plain      {word} {plain:.0f} tokens/s")
    modes = [mode.name for mode in question.profile.power_modes]
    if others := [name for name in modes if name != prediction.power_mode]:
        click.echo(f"  (--power-mode {', '.join(others)}: other rates)")


def _print_methods(prediction: Plan) -> None:
    """Print the time of a pass by its rows, and the best width of each method."""
    click.echo("rows       " + "".join(f"{w:7}" for w in prediction.pass_ms_by_width))
    times = "".join(f"{ms:7.1f}" for ms in prediction.pass_ms_by_width.values())
    click.echo("ms         " + times)
    click.echo(f"at acceptance {prediction.acceptance}, which is assumed:")
    methods = dict.fromkeys((row.method, row.shape) for row in prediction.rows)
    for method, shape in methods:
        rows = [r for r in prediction.rows if (r.method, r.shape) == (method, shape)]
        click.echo(_choice_line(max(rows, key=lambda row: row.tokens_per_second)))
    click.echo("best:")
    click.echo(_choice_line(prediction.best))
    for method, cost in dict.fromkeys((r.method, r.cost) for r in prediction.rows):
        if cost in COST_NOTES:
            click.echo(f"  ({method}: {COST_NOTES[cost]})")


def _print_drafters(drafters: Sequence[Drafter]) -> None:
    """Print which drafter to train, and what fewer or more tokens would change."""
    best = drafters[0]
    if best.choice.speedup <= 1.0:
        click.echo("advice     no drafter: plain decoding is as fast")
        return
    click.echo(
        f"advice     a drafter of width {best.hidden_size}, layers: {best.layers}: "
        f"{best.weights / 1e6:.1f} M weights, a draft step {best.draft_ms:.1f} ms"
    )
    for drafter in drafters:
        click.echo(
            f"  {drafter.tokens / 1e6:9.0f} M tokens ({drafter.tokens // best.weights} "
            f"a weight) acceptance {drafter.acceptance:.2f} "
            f"{drafter.choice.width:3} rows {drafter.choice.tokens_per_second:7.1f} "
            f"tokens/s {drafter.choice.speedup:5.2f}x"
        )


def _print_texts(prediction: Plan, figures: Sequence[TextFigures]) -> None:
    """Print the tokenizer's figures of each text, and speeds in characters."""
    plain, best = prediction.rows[0].tokens_per_second, prediction.best
    for row in figures:
        click.echo(f"tokenizer  {row.line()}")
    for row in (row for row in figures if row.script == WHOLE_TEXT):
        click.echo(
            f"characters {row.text:16} plain {plain * row.characters_per_token:.1f}/s, "
            f"best {best.tokens_per_second * row.characters_per_token:.1f}/s"
        )


def _choice_line(choice: Choice) -> str:
    """Return the line of a choice: method, shape, rows, tokens per pass and second."""
    return (
        f"  {choice.method:7} {choice.shape:5} {choice.width:3} rows "
        f"{choice.tokens_per_pass:6.2f} tokens/pass {choice.tokens_per_second:7.1f} "
        f"tokens/s {choice.speedup:5.2f}x"
    )
