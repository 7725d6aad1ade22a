"""optimum-cli export jetdraft: runs for optimum/commands/register."""

from __future__ import annotations

from collections.abc import Sequence

import click

from jetdraft.cli import Verbs
from jetdraft.cli.export import command as export
from jetdraft.terminal.command import Command


class Exports(Verbs):
    """The group `optimum-cli export`, with jetdraft's command only."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return `jetdraft export` with OUTPUT as its last argument, as in optimum."""
        output = next(param for param in export.params if param.name == "output")
        others = [param for param in export.params if param is not output]
        return Command(
            cmd_name,
            params=[*others, click.Argument(["output"], type=output.type)],
            callback=export.callback,
            help=f"{export.help}\n\nOUTPUT is the bundle folder to write.",
            # Usage lines of optimum promise -h.
            context_settings={"help_option_names": ["-h", "--help"]},
        )


def run(arguments: Sequence[str]) -> None:
    """Export with these arguments and exit; the exit code is 2 after bad input.

    Usage: `run(["target", "bundle", "--drafter", "drafter"])`
    """
    Exports().main(["jetdraft", *arguments], prog_name="optimum-cli export")
