"""jetdraft chat: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from jetdraft.cli.generate import summary
from jetdraft.cli.options import (
    bundle_argument,
    constraint_options,
    runtime_options,
    sampling_options,
)
from jetdraft.errors import JetdraftError
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.model import load
from jetdraft.runtime.text.template import user

HELP = """/stats       what the last reply cost
/reset       start again
/save FILE   keep the conversation
/load FILE   go on with one that was kept
/quit        or Ctrl-D; Ctrl-C only stops a reply"""


@click.command("chat")
@bundle_argument
@click.option("--system", help="What the model is told first.")
@click.option("--max-new-tokens", type=int, default=512, show_default=True)
@click.option("--method", default="auto", show_default=True)
@click.option(
    "--drop-oldest", is_flag=True, help="Forget whole turns where the buffers are full."
)
@constraint_options
@sampling_options
@runtime_options
def command(
    bundle: Path,
    system: str | None,
    drop_oldest: bool,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
    **options: Any,
) -> int:
    """Talk to BUNDLE's model, a line at a time; /help lists what else there is."""
    with load(
        bundle, provider, threads, streams, drafter_provider=drafter_provider
    ) as model:
        talk = Conversation(model, system, drop_oldest, **options)
        # Is there a template, and can the options be?
        model.stream(token_ids=model.chat_prompt([user("")]), **options)
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
        failed = False
        for line in iter(_line, None):
            if line.startswith("/"):
                if _obey(talk, *line.split(maxsplit=1)):
                    break
            elif line.strip():
                failed |= not _answer(talk, line)
    return 2 if failed and not sys.stdin.isatty() else 0


def _line() -> str | None:
    """The next line, None at the end."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


def _answer(talk: Conversation, line: str) -> bool:
    """Print a reply as it comes; an error ends the turn, not the program."""
    try:
        for piece in talk.say(line):
            click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        pass  # what was said stays
    except JetdraftError as error:
        click.echo(f"error: {error}", err=True)
        return False
    click.echo()
    return True


def _obey(talk: Conversation, order: str, file: str = "") -> bool:
    """Do what a line with a slash says; whether to end."""
    try:
        if order == "/quit":
            return True
        if order == "/reset":
            talk.reset()
        elif order == "/stats":
            stats = talk.last.stats if talk.last else None
            said = "nothing was said yet"
            if stats is not None:
                kept = f"{stats.reused_tokens} of {stats.prompt_tokens} tokens kept"
                said = f"{summary(stats)}\n{kept}"
            click.echo(said, err=True)
        elif order in ("/save", "/load") and file:
            (talk.save if order == "/save" else talk.load)(file)
        else:
            click.echo(HELP, err=True)
    except JetdraftError as error:
        click.echo(f"error: {error}", err=True)
    return False
