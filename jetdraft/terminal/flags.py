"""Options and arguments that several verbs share."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from jetdraft.devices.providers import PROVIDERS
from jetdraft.errors import OutputError
from jetdraft.files import replacing
from jetdraft.runtime.planning.drafting import AUTO, SIBLINGS, TREES
from jetdraft.runtime.proposers.draft_stops import NAMES
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from jetdraft.terminal.command import Decorator, option, together

PATH = click.Path(path_type=Path)

bundle_argument = click.argument("bundle", type=PATH)

json_option = option(
    "output",
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON, and nothing else, to standard output.",
)

threads_option = option(
    "runtime",
    "-t",
    "--threads",
    type=int,
    help="Threads of the target; default: all cores.",
)

seed_option = option(
    "sampling",
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random numbers; the same seed gives the same result.",
)

temperature_option = option(
    "sampling",
    "--temperature",
    "--temp",
    type=float,
    default=0.0,
    show_default=True,
    help="Temperature of sampling; 0 always takes the most likely token.",
)

prompts_option = option(
    "prompt",
    "--prompts",
    "prompts_file",
    type=PATH,
    help='JSON lines with "prompt" or "token_ids"; default: four short texts.',
)

method_option = option(
    "drafting",
    "--method",
    default=AUTO,
    show_default=True,
    help="auto, none, draft, lookup, stream, recall, trigram or cascade; or a comma "
    "list to pick from.",
)

store_option = option(
    "drafting",
    "--store",
    type=PATH,
    help="Keep requests and responses in this file, and draft from them; default: "
    "keep nothing.",
)

runtime_options = together(
    threads_option,
    option(
        "runtime",
        "--provider",
        help=f"What runs the target: {', '.join(PROVIDERS)} or auto; default: the "
        "provider of the export.",
    ),
    option(
        "runtime",
        "--drafter-provider",
        help="What runs the drafter: a provider, or off for no drafter; default: the "
        "provider of the export, or --provider.",
    ),
    option(
        "runtime",
        "--streams",
        type=PATH,
        help="A streams.npz of the same base; default: the streams in the bundle.",
    ),
)

sampling_options = together(
    temperature_option,
    option(
        "sampling",
        "--top-k",
        type=int,
        default=0,
        show_default=True,
        help="Sample from this many of the most likely tokens; 0 is off.",
    ),
    option(
        "sampling",
        "--top-p",
        type=float,
        default=1.0,
        show_default=True,
        help="Sample from the most likely tokens up to this total probability; 1 is "
        "off.",
    ),
    option(
        "sampling",
        "--min-p",
        type=float,
        default=0.0,
        show_default=True,
        help="Drop tokens below this share of the highest probability; 0 is off.",
    ),
    seed_option,
)


def new_tokens_option(default: int) -> Decorator:
    """Return -n/--max-new-tokens with a verb's default."""
    return option(
        "ending",
        "-n",
        "--max-new-tokens",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        help="The most tokens of a text.",
    )


def output_option(what: str) -> Decorator:
    """Return -o/--output of a command whose result is a file or folder."""
    return option("output", "-o", "--output", required=True, type=PATH, help=what)


def picture_option(what: str) -> Decorator:
    """Return --picture; refuses a bad place, or no matplotlib, before the work."""
    return option(
        "output",
        "--picture",
        metavar="FILE",
        type=PATH,
        callback=_new_picture,
        help=f"Draw {what} as a PNG; needs matplotlib.",
    )


def _report_file(context: Any, param: Any, value: Path | None) -> Path | None:
    """Refuse a path that no file can have, and a file that holds something else."""
    if value is not None and value.is_file() and not _is_json(value):
        raise click.BadParameter(f"{value} holds no report; choose another file")
    return _new_file(context, param, value)


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _new_file(context: Any, param: Any, value: Path | None) -> Path | None:
    """Refuse a path that no file can have."""
    if value is not None and (value.is_dir() or not value.absolute().parent.is_dir()):
        raise click.BadParameter(
            f"{value} is a folder, or its folder is missing; name a file"
        )
    return value


def _new_picture(context: Any, param: Any, value: Path | None) -> Path | None:
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("a picture needs matplotlib; pip install matplotlib")
    return _new_file(context, param, value)


report_option = option(
    "output",
    "-o",
    "--output",
    type=PATH,
    callback=_report_file,
    help="Write the JSON report to this file.",
)


def _text(context: Any, param: Any, value: str | None) -> str | None:
    """Return the text of a file."""
    if value is None:
        return None
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f"{value} cannot be read ({error}); give a UTF-8 file"
        ) from error


constraint_options = together(
    option(
        "constraint",
        "--json-schema",
        metavar="FILE",
        callback=_text,
        help="Write JSON that follows the JSON schema in this file.",
    ),
    option("constraint", "--regex", help="Write a text that matches this expression."),
    option(
        "constraint",
        "--grammar",
        metavar="FILE",
        callback=_text,
        help="Write a text that follows the grammar in this file, in Lark's notation.",
    ),
)


def write_json(file: Path, fields: Any) -> None:
    """Write a report; the file appears whole. Raises `OutputError`."""
    try:
        with replacing(file) as partial:
            partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write {file} ({error.strerror}); choose another file"
        ) from error


def integers(text: str, option: str) -> list[int]:
    """Parse a comma list of integers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a comma list of integers", param_hint=option
        ) from error


def _integers(context: Any, param: Any, value: str | None) -> list[int] | None:
    return None if value is None else integers(value, param.opts[0])


def _number_or_auto(context: Any, param: Any, value: str | None) -> float | str | None:
    if value is None or value == AUTO:
        return value
    try:
        return float(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is neither a number nor {AUTO}") from error


user_option = option(
    "drafting",
    "--user",
    default="",
    help="The user whose requests in the store count; default: the nameless user.",
)

_drafting = partial(option, "drafting")

drafting_options = together(
    user_option,
    _drafting(
        "--table",
        type=PATH,
        help="A trigram table that jetdraft train table wrote.",
    ),
    _drafting(
        "--tree",
        default=AUTO,
        show_default=True,
        help=f"Shape of a draft, for draft and stream: {', '.join(TREES)}.",
    ),
    _drafting(
        "--siblings",
        default="coupled",
        show_default=True,
        help=f"How children are picked: {', '.join(SIBLINGS)}.",
    ),
    _drafting(
        "--branching",
        callback=_integers,
        help="Comma list: children per level, for k-ary.",
    ),
    _drafting(
        "--tree-parents",
        callback=_integers,
        help="Comma list: the parent of rows 1, 2, ...; 0 is root.",
    ),
    _drafting(
        "--stopping",
        help=f"End a draft where the drafter doubts: {', '.join(NAMES)}.",
    ),
    _drafting(
        "--stop-threshold", type=float, help="The probability that ends a draft."
    ),
    _drafting(
        "--prune-threshold",
        callback=_number_or_auto,
        metavar="NUMBER|auto",
        help="With streams: drop rows that the early exit finds less likely.",
    ),
    _drafting(
        "--verifier",
        default="walk",
        show_default=True,
        help=f"{', '.join(VERIFIERS)}; all but walk need --no-exact.",
    ),
)
"""Options that --drafting KEY=VALUE will replace."""
