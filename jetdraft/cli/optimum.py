"""optimum-cli export jetdraft: what optimum/commands/register hands over."""

from __future__ import annotations

from collections.abc import Sequence

import click

from jetdraft.cli import Verbs
from jetdraft.cli.export import command as export


class Exports(Verbs):
    """`optimum-cli export`, of which only the command jetdraft is ours."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """`jetdraft export`, with OUTPUT as its last argument, as optimum has it."""
        output = next(param for param in export.params if param.name == "output")
        others = [param for param in export.params if param is not output]
        return click.Command(
            cmd_name,
            params=[*others, click.Argument(["output"], type=output.type)],
            callback=export.callback,
            help=f"{export.help}\n\nOUTPUT is the bundle folder to write.",
            # optimum's own usage lines promise -h.
            context_settings={"help_option_names": ["-h", "--help"]},
        )


def run(arguments: Sequence[str]) -> None:
    """Export as `arguments` say; ends the process, with exit code 2 on bad input.

    Usage: `run(["target", "bundle", "--drafter", "drafter"])`
    """
    Exports().main(["jetdraft", *arguments], prog_name="optimum-cli export")
