"""Options and arguments that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import click

from jetdraft.devices.providers import PROVIDERS
from jetdraft.files import check_place, write_text
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.load_options import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.terminal.command import Decorator, option, together
from jetdraft.terminal.prompts import read_input

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
    help="Seed of the random numbers; the same seed gives the same text. Default: "
    "random in generate and chat, otherwise 0.",
)

training_seed_option = option(
    "sampling",
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the random numbers; the same seed gives the same training.",
)

temperature_option = option(
    "sampling",
    "--temperature",
    "--temp",
    type=float,
    help="Temperature of sampling; 0 always takes the most likely token. Default: the "
    "checkpoint's own in generate and chat, otherwise 0.",
)

prompts_option = option(
    "prompt",
    "--prompts",
    "prompts_file",
    type=PATH,
    help='JSON lines with "prompt" or "token_ids"; default: four short texts.',
)

texts_option = option(
    "measurement",
    "--tokenize",
    "texts",
    multiple=True,
    type=PATH,
    help="Say what the tokenizer makes of this text file, by script; give it several "
    "times, for example once for each language.",
)

store_option = option(
    "drafting",
    "--store",
    type=PATH,
    help="Keep requests and responses in this file, and draft from them; default: "
    "keep nothing.",
)

_runtime_flags = together(
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


def runtime_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give the command `runtime`, the arguments of `jetdraft.load` from its flags."""

    @wraps(function)
    def command(
        provider: str | None,
        drafter_provider: str | None,
        threads: int | None,
        streams: Path | None,
        **options: Any,
    ) -> Any:
        runtime = LoadOptions(
            provider=provider,
            drafter_provider=drafter_provider,
            threads=threads,
            streams=streams,
        )
        return function(runtime=runtime, **options)

    return _runtime_flags(command)


sampling_options = together(
    temperature_option,
    option(
        "sampling",
        "--top-k",
        type=int,
        help="Sample from this many of the most likely tokens; 0 is off.",
    ),
    option(
        "sampling",
        "--top-p",
        type=float,
        help="Sample from the most likely tokens up to this total probability; 1 is "
        "off.",
    ),
    option(
        "sampling",
        "--min-p",
        type=float,
        help="Drop tokens below this share of the highest probability; 0 is off.",
    ),
    seed_option,
)


exit_option = option(
    "drafting",
    "--stop-and-exit",
    metavar="HEAD",
    type=PATH,
    help="Let this head end a text that goes wrong, and leave layers out where it may: "
    "jetdraft train exit makes it. Lossy, so it needs --no-exact.",
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


def method_option() -> Decorator:
    """Return --method; its help lists the registry."""
    return option(
        "drafting",
        "--method",
        default=AUTO,
        show_default=True,
        help=f"{', '.join((AUTO, NONE, *methods()))}; or a comma list to pick from.",
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
    """Refuse what `_new_file` refuses, and a file that is not a report."""
    if value is not None and value.is_file() and not _is_report(value):
        raise click.BadParameter(f"{value} holds no report; choose another file")
    return _new_file(context, param, value)


def _is_report(file: Path) -> bool:
    """Whether the file is empty, or holds the rows of an earlier report."""
    try:
        text = file.read_text(encoding="utf-8")
        return not text or "rows" in dict(json.loads(text))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _new_file(context: Any, param: Any, value: Path | None) -> Path | None:
    """Refuse a folder, a device, a pipe, and a path in a missing folder."""
    if value is None:
        return None
    if value.is_dir() or not value.absolute().parent.is_dir():
        raise click.BadParameter(
            f"{value} is a folder, or its folder is missing; name a file"
        )
    if value.exists() and not value.is_file():
        raise click.BadParameter(f"{value} is a device or a pipe; name a file")
    check_place(value)
    return value


def _new_picture(context: Any, param: Any, value: Path | None) -> Path | None:
    if value is not None and find_spec("matplotlib") is None:
        raise click.BadParameter("a picture needs matplotlib; pip install matplotlib")
    value = _new_file(context, param, value)
    if value is not None and value.exists() and not _is_picture(value):
        raise click.BadParameter(f"{value} holds no picture; choose another file")
    return value


def _is_picture(file: Path) -> bool:
    """Whether the file is empty or a PNG."""
    with file.open("rb") as handle:
        return handle.read(8) in (b"", b"\x89PNG\r\n\x1a\n")


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
    return None if value is None else read_input(Path(value))


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
    write_text(file, json.dumps(fields, indent=2) + "\n")


def integers(text: str, option: str) -> list[int]:
    """Parse a comma list of integers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a comma list of integers", param_hint=option
        ) from error


def _settings(context: Any, param: Any, values: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE options; a key may have dashes or underscores."""
    settings = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
        settings[key.replace("-", "_")] = text
    return settings


user_option = option(
    "drafting",
    "--user",
    default="",
    help="The user whose entries count; default: the nameless user.",
)

drafting_option = option(
    "drafting",
    "--drafting",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_settings,
    help="Set an option of the method, for example tree=best of draft; may be given "
    "several times. An unknown KEY lists the keys of the method.",
)


def drafting_options() -> Decorator:
    """Return --method, --num-draft-tokens, --drafting and --exact."""
    return together(
        method_option(),
        option(
            "drafting",
            "--num-draft-tokens",
            type=int,
            help="Draft this many tokens a round, at most this many with several "
            "methods; default: adaptive.",
        ),
        drafting_option,
        option(
            "drafting",
            "--exact/--no-exact",
            default=True,
            show_default=True,
            help="Use only pass widths whose rows agree bit by bit.",
        ),
    )


explain_option = option(
    "output",
    "--explain",
    is_flag=True,
    help="Print to standard error what each method did, and why drafting was off.",
)


def generate_fields(
    options: Mapping[str, Any], model: Model | None = None
) -> GenerateOptions:
    """The options that were given, beside the defaults of a model's checkpoint."""
    defaults = {} if model is None else model.defaults
    # An option that may be given several times is empty without any.
    flags = {n: value for n, value in options.items() if value not in (None, ())}
    return cast(GenerateOptions, {**defaults, **flags})
