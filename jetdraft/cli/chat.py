"""jetdraft chat: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from jetdraft.errors import JetdraftError
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.model import load
from jetdraft.runtime.proposers.parts import LoadOptions
from jetdraft.runtime.text.template import user
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.first_run import announce_first_run
from jetdraft.terminal.flags import (
    bundle_argument,
    constraint_options,
    drafting_option,
    generate_fields,
    method_option,
    new_tokens_option,
    runtime_options,
    sampling_options,
    store_option,
)
from jetdraft.terminal.prompts import read_line
from jetdraft.terminal.summary import summary

HELP = """/stats       print the stats of the last reply
/reset       start again
/save FILE   save the conversation
/load FILE   continue a saved conversation
/quit        end, like Ctrl-D; Ctrl-C only stops a reply"""


@click.command("chat", cls=Command)
@bundle_argument
@option("prompt", "--system", help="The system message.")
@option(
    "prompt",
    "--drop-oldest",
    is_flag=True,
    help="Drop the oldest turns when the buffers are full.",
)
@new_tokens_option(512)
@sampling_options
@constraint_options
@method_option()
@drafting_option
@store_option
@runtime_options
def command(
    bundle: Path,
    system: str | None,
    drop_oldest: bool,
    runtime: LoadOptions,
    **options: Any,
) -> int:
    """Talk to BUNDLE's model, line by line; /help lists the commands."""
    with load(bundle, **runtime) as model:
        announce_first_run(model)
        fields = generate_fields(options, model)
        talk = Conversation(model, system, drop_oldest, **fields)
        # Raises for a missing template or a bad option, before the first line is read.
        model.stream(token_ids=model.chat_prompt([user("")]), **fields)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
        failed = False
        for line in iter(_read_line, None):
            if line.startswith("/"):
                if _obey(talk, *line.split(maxsplit=1)):
                    break
            elif line.strip():
                failed |= not _answer(talk, line)
    return 2 if failed and not sys.stdin.isatty() else 0


def _read_line() -> str | None:
    """Return the next line, or None at the end of input."""
    try:
        return input("> ") if sys.stdin.isatty() else read_line()
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _answer(talk: Conversation, line: str) -> bool:
    """Print the reply as it comes; False if an error ended it, but not the chat."""
    try:
        for piece in talk.say(line):
            click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        pass  # The conversation keeps the reply so far.
    except JetdraftError as error:
        click.echo(f"error: {error}", err=True)
        return False
    click.echo()
    return True


def _obey(talk: Conversation, order: str, file: str = "") -> bool:
    """Carry out a line that begins with a slash; True if it ends the conversation."""
    try:
        if order == "/quit":
            return True
        if order == "/reset":
            talk.reset()
        elif order == "/stats":
            click.echo(_stats(talk), err=True)
        elif order in ("/save", "/load") and file:
            (talk.save if order == "/save" else talk.load)(file)
        else:
            click.echo(HELP, err=True)
    except JetdraftError as error:
        click.echo(f"error: {error}", err=True)
    return False


def _stats(talk: Conversation) -> str:
    if talk.last is None:
        return "there is no reply yet"
    stats = talk.last.stats
    reused = f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens kept"
    return f"{summary(stats)}\n{reused}"
