"""Where optimum-cli looks for commands of other packages: `export jetdraft`.

Every optimum-cli imports this file, so jetdraft itself is imported by `run` only. No
folder above may have an __init__.py: optimum would be hidden behind it.
"""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class JetdraftExportCommand(BaseOptimumCLICommand):
    """`jetdraft export` with OUTPUT in place of --output."""

    COMMAND = CommandInfo(
        name="jetdraft", help="Export a model and its drafter to a jetdraft bundle."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Take everything as it is."""
        # Without prefixes nothing is an option to argparse: --help too goes to click.
        parser.prefix_chars = ""
        parser.add_argument("arguments", nargs=REMAINDER)

    def run(self) -> None:
        """Export; bad input ends with exit code 2."""
        from jetdraft.cli.export import run_for_optimum

        run_for_optimum(self.args.arguments)


REGISTER_COMMANDS = [(JetdraftExportCommand, ExportCommand)]
