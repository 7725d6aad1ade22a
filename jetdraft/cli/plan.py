"""jetdraft plan: predicts the memory and speed of a model on another device."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.command import Command, keyword_flags
from jetdraft.cli.flags import PATH, json_option
from jetdraft.contracts.tensors import WIDEST
from jetdraft.devices import plan as plans
from jetdraft.devices.cost_model import CONFIG, Encoder
from jetdraft.errors import JetdraftError, importing
from jetdraft.runtime.planning.registry import methods

# What the assumed acceptance means for a method, by the cost of its drafts.
COST_NOTES = {
    plans.PROBES: "for a target that jetdraft train stream has trained",
    plans.FREE: "for a text that repeats itself that often; it drafts nothing else",
}
NO_METHODS_LINE = (
    "methods    not predicted: what a further row costs on this CPU was never "
    "measured; on the board: jetdraft tune BUNDLE, jetdraft bench BUNDLE"
)

# Widths and heights of the pictures that are planned.
PICTURES = ((512, 384), (1024, 768), (1920, 1080), (2048, 1536))


@click.command("plan", cls=Command)
@click.argument("target", type=PATH)
@keyword_flags(plans.Question)
@json_option
def command(target: Path, as_json: bool, **options: Any) -> None:
    """Predict memory and speed of TARGET, a GGUF file, a config.json or its folder."""
    costs = tuple(
        plans.MethodCost(method.name, method.cost, method.trees)
        for method in methods().values()
        if method.cost is not None  # it cannot be predicted on a device
    )
    question = plans.Question(target, **options, methods=costs)  # refuses a bad option
    question = replace(question, encoder=_encoder(target))  # imports torch
    prediction = plans.plan(question)
    if as_json:
        click.echo(json.dumps(prediction.to_json()))
    if not prediction.fits:
        raise plans.does_not_fit_error(question, prediction)
    if not as_json:
        _print_plan(prediction, question)
        if question.on_cpu:
            click.echo(NO_METHODS_LINE)
        else:
            _print_methods(prediction)


def _encoder(target: Path) -> Encoder | None:
    """The work of the target's encoder of pictures; None without one."""
    folder = target.parent if target.name == CONFIG else target
    if not [*folder.glob("*processor_config.json")]:
        return None
    try:
        with importing("to plan for images", "export,images"):
            from jetdraft.checkpoints.vision import count_work
        return count_work(str(folder), PICTURES)
    except JetdraftError as error:
        warnings.warn(f"passed over: images: {error}", stacklevel=2)
        return None


def _print_plan(prediction: plans.Plan, question: plans.Question) -> None:
    click.echo(f"predicted  {prediction.basis}")
    named = prediction.memory_mb.items()
    parts = " + ".join(f"{name} {mb:.0f}" for name, mb in named if mb)
    click.echo(f"device     {prediction.device}, {prediction.power_mode}")
    fact = f"memory     {prediction.needed_mb:.0f} MB of {prediction.available_mb:.0f} "
    without = "; without the encoder's buffers" * bool(prediction.pictures)
    click.echo(f"{fact}({parts}{without})")
    if (sizes := prediction.sizes).experts:
        read = sizes.read_weights(WIDEST) + sizes.head
        click.echo(
            f"experts    {sizes.used} of {sizes.experts} for a row: it uses "
            f"{(sizes.row_weights + sizes.head) / 1e9:.1f} of "
            f"{sizes.weights / 1e9:.1f} billion weights; {WIDEST} rows that choose at "
            f"random read {read / 1e9:.1f}"
        )
    plain = prediction.rows[0].tokens_per_second
    word = "at most" if question.on_cpu else "about"
    click.echo(f"plain      {word} {plain:.0f} tokens/s")
    modes = [mode.name for mode in question.profile.power_modes]
    if others := [name for name in modes if name != prediction.power_mode]:
        click.echo(f"  (--power-mode {', '.join(others)}: other rates)")
    word = "at least" if question.on_cpu else "about"
    for row in prediction.pictures:
        *figures, (_, ms) = row.items()
        shown = "".join(f"{name} {number:.5g}, " for name, number in figures)
        click.echo(f"image      {shown}{word} {ms:.5g} ms")


def _print_methods(prediction: plans.Plan) -> None:
    click.echo("rows       " + "".join(f"{w:7}" for w in prediction.pass_ms_by_width))
    times = "".join(f"{ms:7.1f}" for ms in prediction.pass_ms_by_width.values())
    click.echo("ms         " + times)
    click.echo(f"at acceptance {prediction.acceptance}, which is assumed:")
    methods = dict.fromkeys((row.method, row.shape) for row in prediction.rows)
    for method, shape in methods:
        rows = [r for r in prediction.rows if (r.method, r.shape) == (method, shape)]
        click.echo(_choice_line(max(rows, key=lambda row: row.tokens_per_second)))
    click.echo(f"best:\n{_choice_line(prediction.best)}")
    for method, cost in dict.fromkeys((r.method, r.cost) for r in prediction.rows):
        if cost in COST_NOTES:
            click.echo(f"  ({method}: {COST_NOTES[cost]})")


def _choice_line(choice: plans.Choice) -> str:
    return (
        f"  {choice.method:7} {choice.shape:5} {choice.width:3} rows "
        f"{choice.tokens_per_pass:6.2f} tokens/pass {choice.tokens_per_second:7.1f} "
        f"tokens/s {choice.speedup:5.2f}x"
    )
