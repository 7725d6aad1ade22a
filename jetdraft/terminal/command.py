"""Commands whose help lists options in groups, and commands that are imported late."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import click

from jetdraft.errors import JetdraftError

GROUPS = (
    "prompt",
    "checkpoint",
    "quantization",
    "ending",
    "sampling",
    "constraint",
    "drafting",
    "training",
    "measurement",
    "device",
    "server",
    "limits",
    "runtime",
    "output",
)
"""The groups of options, in the order in which help prints them."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Option(click.Option):
    """An option of one of the `GROUPS`; write it with `option`."""

    def __init__(self, *names: Any, group: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group


class Command(click.Command):
    """A command whose help lists its options in groups.

    @click.command("generate", cls=Command)
    """

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write a section for each group that has options."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                # Only click's own --help has no group.
                groups[getattr(param, "group", "output")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(records)


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is used.

    `summaries` has a line for each command, so that help imports no command. The
    command NAME is the variable `command` of the module `package.NAME`.
    """

    package: str
    summaries: Mapping[str, str]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `summaries`."""
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None for an unknown name."""
        if cmd_name not in self.summaries:
            return None
        command: click.Command = self.load(cmd_name).command
        return command

    def load(self, name: str) -> Any:
        """Import the module of a command."""
        return importlib.import_module(f"{self.package}.{name}")

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the summary of each command, without importing it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))


def option(group: str, *names: str, help: str, **settings: Any) -> Decorator:
    """Decorate a command with an option of a group; `settings` are click's.

    @option("runtime", "-t", "--threads", type=int, help="Threads of the target.")
    """
    if group not in GROUPS:
        raise ValueError(f"unknown group {group!r}")
    return click.option(*names, cls=Option, group=group, help=help, **settings)


def together(*decorators: Decorator) -> Decorator:
    """Join decorators into one; help lists their options in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def extra_module(name: str, doing: str, extra: str) -> Any:
    """Import a module that needs the packages of an extra.

    Raises `JetdraftError`, with the command that installs them, if a package is
    missing. `doing` says in that error what needs the package.

        extra_module("jetdraft.server.app", "serving", "serve")
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JetdraftError(
            f"{doing} needs {error.name}; pip install 'jetdraft[cpu,{extra}]'"
        ) from error
