"""Options that several verbs share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from jetdraft.devices.providers import PROVIDERS
from jetdraft.errors import JetdraftError
from jetdraft.runtime.planning.drafting import AUTO, SIBLINGS, TREES
from jetdraft.runtime.proposers.draft_stops import NAMES
from jetdraft.runtime.sampling.verifiers import VERIFIERS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))


def optional(module: str, doing: str, extra: str) -> Any:
    """A module that only an extra's packages let in, or what to install."""
    try:
        return importlib.import_module(f"jetdraft.{module}")
    except ImportError as error:
        raise JetdraftError(
            f"{doing} needs {error.name}; pip install 'jetdraft[cpu,{extra}]'"
        ) from error


def runtime_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where and with how many threads a bundle runs."""
    for option in (
        click.option(
            "--threads", type=int, help="Threads of the target; default: all cores."
        ),
        click.option(
            "--provider",
            help=f"{', '.join(PROVIDERS)} or auto; default: the one exported for.",
        ),
        click.option(
            "--drafter-provider",
            help="Who runs the drafter, or off; default: the one exported for, or "
            "--provider.",
        ),
        click.option(
            "--streams",
            type=click.Path(path_type=Path),
            help="A streams.npz of the same base; default: the bundle's.",
        ),
    ):
        function = option(function)
    return function


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How tokens are chosen."""
    for option in (
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--min-p", type=float, default=0.0, help="0 is off."),
        click.option("--top-p", type=float, default=1.0, help="1 is off."),
        click.option("--top-k", type=int, default=0, help="0 is off."),
        click.option(
            "--temperature", type=float, default=0.0, help="0 (default) is greedy."
        ),
    ):
        function = option(function)
    return function


def ending_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """When a text ends, and what its tokens are kept from."""
    for option in (
        click.option(
            "--logprobs",
            type=int,
            help="With --json: log probabilities, also of so many other tokens.",
        ),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID=NUMBER",
            callback=_biases,
            help="Add to a token's logit; may be given several times.",
        ),
        click.option(
            "--frequency-penalty",
            type=float,
            default=0.0,
            help="Taken off for each time that a token was said; 0 is off.",
        ),
        click.option(
            "--presence-penalty",
            type=float,
            default=0.0,
            help="Taken off tokens that were said; 0 is off.",
        ),
        click.option(
            "--repetition-penalty",
            type=float,
            default=1.0,
            help="Divides logits of tokens in prompt and text; 1 is off.",
        ),
        click.option("--max-seconds", type=float, help="End the text after that."),
        click.option(
            "--stop",
            multiple=True,
            metavar="TEXT",
            help="End the text before TEXT; may be given several times.",
        ),
    ):
        function = option(function)
    return function


def constraint_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the text must be."""
    for option in (
        click.option(
            "--grammar",
            metavar="FILE",
            callback=_text,
            help="The text follows this grammar, in the notation of Lark.",
        ),
        click.option("--regex", help="The text is one of this regular expression."),
        click.option(
            "--json-schema",
            metavar="FILE",
            callback=_text,
            help="The text is JSON of this schema.",
        ),
    ):
        function = option(function)
    return function


def _text(context: Any, param: Any, value: str | None) -> str | None:
    """What is in a file."""
    if value is None:
        return None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f"{value} cannot be read ({error}); give a UTF-8 file"
        ) from error


def _biases(context: Any, param: Any, values: Sequence[str]) -> dict[int, float] | None:
    """What was given as ID=NUMBER."""
    found = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not ID=NUMBER") from error
    return found or None


def drafting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a drafter drafts, and how it is verified."""
    for option in (
        click.option(
            "--verifier",
            default="walk",
            show_default=True,
            help=f"{', '.join(VERIFIERS)}; all but walk need --no-exact.",
        ),
        click.option(
            "--prune-threshold",
            callback=_number_or_auto,
            metavar="NUMBER|auto",
            help="With streams: drop rows that an early exit thinks less likely.",
        ),
        click.option(
            "--stop-threshold", type=float, help="The probability it goes by."
        ),
        click.option(
            "--stopping",
            help=f"End a drafter's draft where it doubts: {', '.join(NAMES)}.",
        ),
        click.option(
            "--tree-parents",
            help="Comma list: the parent of rows 1, 2, ...; 0 is root.",
        ),
        click.option("--branching", help="Comma list: children per level, for k-ary."),
        click.option(
            "--siblings",
            default="coupled",
            show_default=True,
            help=f"How children are picked: {', '.join(SIBLINGS)}.",
        ),
        click.option(
            "--tree",
            default="auto",
            show_default=True,
            help=f"Shape of a draft, for draft and stream: {', '.join(TREES)}.",
        ),
    ):
        function = option(function)
    return function


def _number_or_auto(context: Any, param: Any, value: str | None) -> float | str | None:
    """The number as a float."""
    if value is None or value == AUTO:
        return value
    try:
        return float(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no number, nor {AUTO}") from error


def integers(text: str, option: str) -> list[int]:
    """A comma list of integers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a comma list of integers", param_hint=option
        ) from error


def picture(context: Any, param: Any, value: Path | None) -> Path | None:
    """Where a PNG can be written, looked at before anything is measured for it."""
    if value is not None and (value.is_dir() or not value.absolute().parent.is_dir()):
        raise click.BadParameter(f"{value} is a folder, or in none; name a file")
    return value
