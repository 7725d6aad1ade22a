"""Commands whose help lists options in groups, and options made of declared fields."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import Any, is_typeddict

import click

from jetdraft.errors import refusing
from jetdraft.options import Option as Declared
from jetdraft.options import declared_options

# The groups of options, in the order in which help prints them.
GROUPS = (
    *("prompt", "checkpoint", "quantization", "ending", "sampling", "constraint"),
    *("drafting", "training", "measurement", "device", "server", "limits", "runtime"),
    "output",
)
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Names = Collection[str] | None  # Of fields; None for all.


class Option(click.Option):
    """An option in one of the `GROUPS` of help; make it with `option`."""

    def __init__(self, *names: Any, group: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group


class Command(click.Command):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: click.Context, writer: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups[getattr(param, "group", "output")].append(record)
        for name, records in groups.items():
            if records:
                with writer.section(name.capitalize()):
                    writer.write_dl(records)


class LazyGroup(click.Group):
    """A group that imports the command NAME from `package.NAME` when it is used."""

    package: str
    summaries: Mapping[str, str]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        module = importlib.import_module(f"{self.package}.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; raises `UsageError` with all names for an unknown name."""
        name, names = args[0], ", ".join(self.summaries)
        is_word = not name.startswith("-") and not ctx.resilient_parsing
        if is_word and self.get_command(ctx, name) is None:
            raise click.UsageError(f"No such command {name!r}; choose {names}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, writer: click.HelpFormatter) -> None:
        with writer.section("Commands"):
            writer.write_dl(list(self.summaries.items()))


def option(names: str, help: str, **settings: Any) -> Decorator:
    """Decorate a command with an option; `names` are its group and click's names.

    @option("prompt -p --prompt text", 'The prompt; "-" reads standard input.')
    """
    group, *own = names.split()
    if group not in GROUPS:
        raise ValueError(f"unknown group {group!r}")
    settings.setdefault("show_default", bool(settings.get("default")))
    return click.option(*own, cls=Option, group=group, help=help, **settings)


def keyword_flags(
    record: type[Any], /, *, only: Names = None, **defaults: Any
) -> Decorator:
    """A flag for each field of a record, or of `only`; `defaults` replace its own."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for declared_option in reversed(_chosen_options(record, only)):
            function = _click_option(declared_option, defaults)(function)
        return function

    return decorate


def _chosen_options(record: type[Any], only: Names) -> list[Declared]:
    return [o for o in declared_options(record) if only is None or o.name in only]


def record_flags(
    name: str, record: type[Any], /, *, only: Names = None, **defaults: Any
) -> Decorator:
    """Like `keyword_flags`, but the command gets a `record` as the keyword `name`."""
    names = [option.name for option in _chosen_options(record, only)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**options: Any) -> Any:
            own = {field: options.pop(field) for field in names}
            if is_typeddict(record):
                own = {n: value for n, value in own.items() if value not in (None, ())}
            return function(**{name: record(**own)}, **options)

        return keyword_flags(record, only=only, **defaults)(command)

    return decorate


def _click_option(declared_option: Declared, defaults: Mapping[str, Any]) -> Decorator:
    flag, kind = declared_option.flag, declared_option.kind
    default, help_ = declared_option.default, declared_option.help
    default = defaults.get(declared_option.name, default)
    if flag.unset and not default:
        help_ = f"{help_.removesuffix('.')}; default: {flag.unset}."
    long = f"--{declared_option.name.replace('_', '-')}"
    names, settings = flag.names or (long,), dict[str, Any](metavar=flag.metavar)
    if flag.commas:
        settings |= {"callback": parse_integers, "default": None}
    elif kind is bool:
        if default and not flag.names:
            names = (f"{long}/--no-{long[2:]}",)
        settings |= {"is_flag": True, "default": bool(default)}
        settings["show_default"] = any("/" in name for name in names)
    else:
        settings["type"] = _click_type(declared_option)
        settings["multiple"] = declared_option.multiple
        if default is MISSING:
            settings["required"] = True
        elif default not in (None, ()):
            is_shown = flag.show_default and default != ""
            settings |= {"default": default, "show_default": is_shown}
    words = " ".join((flag.group, *names, declared_option.name))
    return option(words, help_, **settings)


def parse_integers(context: Any, param: Any, value: str | None) -> tuple[int, ...]:
    """Parse a comma list of integers; () without one. A callback of click."""
    fact = f"{value!r} is not a comma list of integers"
    with refusing(click.BadParameter(fact, param_hint=param.opts[0]), ValueError):
        return () if value is None else tuple(map(int, value.split(",")))


def _click_type(declared_option: Declared) -> Any:
    flag, kind = declared_option.flag, declared_option.kind
    if flag.choices:
        return click.Choice(flag.choices)
    if kind is Path:
        return click.Path(path_type=Path)
    least = flag.least if flag.above is None else flag.above
    if least is None and flag.most is None:
        return kind
    bounded: Any = click.IntRange if kind is int else click.FloatRange
    return bounded(least, flag.most, min_open=flag.above is not None)
