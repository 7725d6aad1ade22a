"""The command line: one command, one module per verb."""

import errno
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from traceback import walk_stack
from types import FrameType
from typing import Any, NoReturn

import click

from jetdraft import __version__
from jetdraft.cli.command import Command, LazyGroup
from jetdraft.errors import DraftingError, JetdraftError, ProviderError, printable
from jetdraft.ort import silenced

MAX_MESSAGE_CHARS = 2000  # The most characters of an error or a warning.
# The seconds until a signal that came during a finalizer is sent again.
FINALIZING_SECONDS = 0.01
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FILE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EISDIR, errno.ENOTDIR, errno.EINVAL),
)
# A line of help for each verb; the module `jetdraft.cli.NAME` has its command.
VERBS = {
    "export": "Export checkpoints to a bundle.",
    "generate": "Generate a text.",
    "embed": "Embed texts, for a search by meaning.",
    "transcribe": "Write down what is said in a WAV file.",
    "chat": "Talk to a model, line by line.",
    "serve": "Answer the APIs of OpenAI, Anthropic and Ollama over HTTP.",
    "bench": "Measure every method against plain decoding.",
    "check": "Check a bundle, and that every method gives the same text.",
    "tune": "Measure passes and proposers on this machine.",
    "plan": "Predict memory and speed on a device.",
    "doctor": "Examine this machine; list the devices that jetdraft knows.",
    "train": "Train a model to draft.",
    "store": "List or clear what a store or a learning folder keeps.",
}
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # numpy, on a full disk.
# The keyword or function of Python that a message names behind a flag.
_PYTHON_HINT = re.compile(r" \((?:\w+=\w*|(?:Model|Conversation)\.\w+)\)")


class OneLineErrors(click.Command):
    """Prints an error as one line and exits with 2, or after Ctrl-C with 130."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command and exit with the code that it returns, 0 for None."""
        extra["standalone_mode"] = False
        _prepare_streams()
        try:
            with _one_line_warnings(), _exit_on_sigterm(), silenced(logging.WARNING):
                result = super().main(*args, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(2)
        except click.ClickException as error:
            _fail(error.format_message())
        except JetdraftError as error:
            _fail(message_with_flags(error))
        except OSError as error:
            # On the disk, in a quota, by a limit; numpy gives no number.
            is_short = error.errno is None and _SHORT_WRITE.fullmatch(str(error))
            if is_short or error.errno in FULL_ERRORS:
                _fail("the disk is full; free some space")
            if error.errno not in FILE_ERRORS or error.filename is None:
                raise
            fact = f"the system refuses {error.filename} ({error.strerror})"
            _fail(f"{fact}; check its name and its permissions")
        except MemoryError:
            fact = "there is not enough memory; end other programs, give fewer"
            _fail(f"{fact} --threads, or export with a smaller --capacity")
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            sys.exit(130)
        sys.exit(result if isinstance(result, int) else 0)


class Verbs(OneLineErrors, LazyGroup):
    """The group of jetdraft's verbs."""

    package = "jetdraft.cli"
    summaries = VERBS


class StandaloneCommand(OneLineErrors, Command):
    """A command outside of the group `jetdraft`, for the programs in tools/."""


def message_with_flags(error: JetdraftError) -> str:
    """Return an error's message for the terminal: with dashes in names of options."""
    message = _PYTHON_HINT.sub("", str(error))
    if isinstance(error, DraftingError):
        # It loads the packages of methods, which an error of drafting has loaded.
        from jetdraft.runtime.planning.registry import methods

        options = [method.options.option_names() for method in methods().values()]
        for name in {name for names in options for name in names if "_" in name}:
            message = re.sub(rf"\b{name}\b", name.replace("_", "-"), message)
    return message


def _prepare_streams() -> None:
    """Let outputs hold any text, and open closed streams on the null device.

    A store that is opened next would get the number of a closed stream, and its prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a locale may have ASCII only
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    """In the block, print jetdraft's warnings in one line, and no others."""

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if category is UserWarning:
            click.echo(f"warning: {_one_line(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """In the block, let SIGTERM raise `SystemExit`; does nothing in other threads."""
    if is_main := threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # a library's cleanup may fail and hide the exit
            if isinstance(cause, SystemExit):
                raise cause from error
            cause = cause.__context__
        raise
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    """Raise `SystemExit`, but later if in a finalizer, which drops exceptions."""
    if all(caller.f_code.co_name != "__del__" for caller, _ in walk_stack(frame)):
        sys.exit(128 + number)
    again = threading.Timer(FINALIZING_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _fail(message: str) -> NoReturn:
    with suppress(OSError):  # standard error may be a file on a full disk
        click.echo(f"error: {_one_line(message)}", err=True)
    sys.exit(2)


def _one_line(message: str) -> str:
    return printable(" ".join(message.split()), MAX_MESSAGE_CHARS)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    # onnxruntime takes a quarter of a second, which no other verb should pay.
    from jetdraft.devices.providers import installed_providers
    from jetdraft.ort import ort

    click.echo(f"jetdraft {__version__}")
    try:
        providers = ", ".join(installed_providers())
        click.echo(f"onnxruntime {ort.__version__}\nproviders {providers}")
    except ProviderError:
        click.echo("onnxruntime is not installed")
    ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the versions of jetdraft and onnxruntime, and the providers.",
)
def main() -> None:
    """Decode several tokens per pass on small devices, with the same text."""
