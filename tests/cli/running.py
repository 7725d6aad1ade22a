"""Running commands in this process, and what a refusal looks like."""

import sys
from collections.abc import Callable, Iterable
from subprocess import CompletedProcess
from typing import Any

from click import Command
from click.testing import CliRunner, Result

from jetdraft.cli import main
from tests.programs import ROOT, ended

INTERRUPTIBLE = """
import signal
from jetdraft.cli import main
# A shell's background jobs ignore Ctrl-C, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
"""The command line as a terminal would start it, for `python -c`."""


def jetdraft(
    *arguments: object, stdin: str | bytes | None = None, command: Command = main
) -> Result:
    """What `jetdraft ARGUMENTS`, or another command, prints and how it ends."""
    return CliRunner().invoke(command, [str(part) for part in arguments], input=stdin)


def succeed(*arguments: object, **how: Any) -> Result:
    """What a command prints, see `jetdraft`, that must end well."""
    result = jetdraft(*arguments, **how)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def without(package: str, *arguments: object) -> CompletedProcess[str]:
    """What a process prints in which `jetdraft ARGUMENTS` finds no such package."""
    code = f"import sys; sys.modules['{package}'] = None\n"
    code += "from jetdraft.cli import main; main(sys.argv[1:])"
    return ended(sys.executable, "-c", code, *arguments, cwd=ROOT)


def assert_refused(
    result: Result, *said: str, of: Callable[[Iterable[bool]], bool] = all
) -> None:
    """Exit code 2 and one line, which says all (or any) of this."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert of(part in result.stderr for part in said), result.stderr
