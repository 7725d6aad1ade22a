"""Options and arguments that several verbs share."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.command import Decorator, option, record_flags
from jetdraft.cli.console import read_input
from jetdraft.files import check_writable, write_text
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.planning.registry import AUTO

PATH = click.Path(path_type=Path)  # Arguments and options that are paths.
# Fields that several verbs share: of `LoadOptions`, then of `GenerateOptions`.
RUNTIME = ("threads", "provider", "drafter_provider", "streams", "adapter")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
CONSTRAINTS = ("json_schema", "regex", "grammar")
DRAFTING = ("method", "num_draft_tokens", "drafting", "exact")

bundle_argument = click.argument("bundle", type=PATH)

json_option = option(
    "output --json as_json",
    "Print JSON, and nothing else, to standard output.",
    is_flag=True,
)

prompts_option = option(
    "prompt --prompts prompts_file",
    'JSON lines with "prompt" or "token_ids"; default: four short texts.',
    type=PATH,
)

explain_option = option(
    "output --explain",
    "Print to standard error what each method did, and why drafting was off.",
    is_flag=True,
)


def runtime_options(*more: str) -> Decorator:
    """Decorate a command with flags of `LoadOptions`; it gets them as `runtime`."""
    return record_flags("runtime", LoadOptions, only=(*RUNTIME, *more))


def generate_options(*names: str, **defaults: Any) -> Decorator:
    """Decorate a command with flags of `GenerateOptions`; it gets them as `options`."""
    own = {"method": AUTO, "exact": True, **defaults}
    as_options = record_flags("options", GenerateOptions, only=names, **own)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(options: dict[str, Any], **others: Any) -> Any:
            for field in {"json_schema", "grammar"} & options.keys():
                options[field] = read_input(options[field])
            if "drafting" in options:
                options["drafting"] = parse_settings(options["drafting"])
            return function(options=options, **others)

        return as_options(command)

    return decorate


def parse_settings(values: Sequence[str], flag: str = "drafting") -> dict[str, str]:
    """Parse values of the form KEY=VALUE into a dict; raises `BadParameter`."""
    settings = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator:
            fact = f"{value!r} is not KEY=VALUE"
            raise click.BadParameter(fact, param_hint=f"'--{flag}'")
        settings[key.replace("-", "_")] = text
    return settings


def output_option(what: str) -> Decorator:
    """Return the required option -o/--output, a path; `what` is its help."""
    return option("output -o --output", what, required=True, type=PATH)


def _check_report_path(context: Any, param: Any, value: Path | None) -> Path | None:
    """Return the path of a report, unless a file there has something else."""
    if value is not None and value.is_file():
        is_report = False
        with suppress(OSError, ValueError, TypeError, RecursionError):
            text = value.read_text(encoding="utf-8")
            is_report = not text or "rows" in dict(json.loads(text))
        if not is_report:
            raise click.BadParameter(f"{value} holds no report; choose another file")
    return check_new_file(value)


def check_new_file(value: Path | None) -> Path | None:
    """Return `value`; raises `BadParameter` unless it can be the path of a file."""
    if value is None:
        return None
    if value.is_dir() or not value.absolute().parent.is_dir():
        fact = f"{value} is a folder, or its folder is missing; name a file"
        raise click.BadParameter(fact)
    if value.exists() and not value.is_file():
        raise click.BadParameter(f"{value} is a device or a pipe; name a file")
    check_writable(value)
    return value


report_option = option(
    "output -o --output",
    "Write the JSON report to this file.",
    type=PATH,
    callback=_check_report_path,
)


def write_json(file: Path, fields: Any) -> None:
    """Write a JSON report; the file appears whole. Raises `OutputError`."""
    write_text(file, json.dumps(fields, indent=2) + "\n")


user_option = option(
    "drafting --user",
    "The user whose entries count; default: the nameless user.",
    default="",
)
