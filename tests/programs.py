"""Programs of the repository, run as modules, as processes and as commands in here."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click import Command
from click.testing import CliRunner, Result

from jetdraft.cli import main
from jetdraft.errors import OptionError

ROOT = Path(__file__).parents[1]
INTERRUPTIBLE = """
import signal
from jetdraft.cli import main
from jetdraft.errors import OptionError
# A shell's background jobs ignore Ctrl-C, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
"""The command line as a terminal would start it, for `python -c`."""

SEVERAL = """
import json, sys
from jetdraft.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        print("code", ended.code, file=sys.stderr)
"""
"""Run several commands in one process, as far apart as possible from this one."""


def module_of(file: str, patch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.syspath_prepend(path.parent)
    # Dataclasses look there for their types.
    patch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def ended(*command: object, **how: Any) -> subprocess.CompletedProcess[str]:
    words = [*map(str, command)]
    return subprocess.run(words, check=False, capture_output=True, text=True, **how)


def printed(*command: object, **how: Any) -> str:
    done = ended(*command, **how)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def python(code: str, *arguments: object, **how: Any) -> str:
    return printed(sys.executable, "-c", code, *arguments, **how)


def jetdraft(
    *arguments: object, stdin: str | bytes | None = None, command: Command = main
) -> Result:
    """What `jetdraft ARGUMENTS`, or another command, prints and how it ends."""
    return CliRunner().invoke(command, [str(part) for part in arguments], input=stdin)


def several(*commands: Iterable[object]) -> list[str]:
    """The words with which a process runs several commands of jetdraft."""
    words = [[str(word) for word in command] for command in commands]
    return [sys.executable, "-c", SEVERAL, json.dumps(words)]


def succeed(*arguments: object, **how: Any) -> Result:
    """What a command prints, see `jetdraft`, that must end well."""
    result = jetdraft(*arguments, **how)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def without(package: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What a process prints in which `jetdraft ARGUMENTS` finds no such package."""
    code = f"import sys; sys.modules['{package}'] = None\n"
    code += "from jetdraft.cli import main; main(sys.argv[1:])"
    return ended(sys.executable, "-c", code, *arguments, cwd=ROOT)


def assert_refused(
    result: Result, *said: str, of: Callable[[Iterable[bool]], bool] = all
) -> None:
    """Exit code 2 and, after any progress, a line that says all (or any) of this."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *stages, error = result.stderr.splitlines(keepends=True)
    assert all(stage.startswith("after ") for stage in stages), result.stderr
    assert error.startswith("error: ")
    assert of(part in error for part in said), error


@contextmanager
def refused_option(words: str, field: str = "drafting") -> Iterator[None]:
    with pytest.raises(OptionError, match=words) as refusal:
        yield
    assert refusal.value.field == field
