"""The command line: one command, one module per verb."""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from typing import Any, NoReturn

import click

from jetdraft import __version__
from jetdraft.errors import JetdraftError

VERBS = (
    "plan", "devices", "doctor", "train", "quantize", "export", "generate", "chat",
    "serve", "bench", "tune", "check", "inspect", "store",
)  # fmt: skip


class Verbs(click.Group):
    """Loads a verb's module when it is used, and turns errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command named after its module."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"jetdraft.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run; bad input ends with exit code 2, Ctrl-C with 130."""
        extra["standalone_mode"] = False
        warnings.showwarning = _show
        # Whoever ends us lets us clean up, as Ctrl-C does.
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            result = super().main(*args, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.ClickException as error:
            _fail(error.format_message())
        except JetdraftError as error:
            _fail(str(error))
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(130)
        finally:
            signal.signal(signal.SIGTERM, before)
        sys.exit(result if isinstance(result, int) else 0)


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _show(
    message: Warning | str, category: type[Warning], *where: Any, **more: Any
) -> None:
    """A warning of ours in one line; those of others say nothing to a user."""
    if category is UserWarning:
        click.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _fail(message: str) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)


@click.group(cls=Verbs)
@click.version_option(__version__, prog_name="jetdraft")
def main() -> None:
    """Decode several tokens per pass on small devices, with the same text."""
