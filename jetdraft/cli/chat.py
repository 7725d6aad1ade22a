"""jetdraft chat: a conversation in the terminal."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from jetdraft.cli import flags, message_with_flags
from jetdraft.cli.command import Command, option
from jetdraft.cli.console import announce_first_run, read_line, stats_line
from jetdraft.errors import JetdraftError
from jetdraft.runtime.conversation import Conversation
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.passes.pictures import PictureInput, read_picture
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.text.template import user_message

HELP_TEXT = """/stats       print the stats of the last reply
/reset       start again, without images
/save FILE   save the conversation
/load FILE   continue a saved conversation
/image FILE  show an image with the next message; without FILE no image
/quit        end, like Ctrl-D; Ctrl-C only stops a reply
Pasted lines are one message."""


@click.command("chat", cls=Command)
@flags.bundle_argument
@option("prompt --system", "The system message.")
@option(
    "prompt --drop-oldest",
    "Drop the oldest turns when the buffers are full.",
    is_flag=True,
)
@option(
    "prompt --template variables",
    "Set a variable of the chat template, for example enable_thinking=false; may "
    "be given several times.",
    metavar="NAME=VALUE",
    multiple=True,
)
@flags.generate_options(
    *("max_new_tokens", "max_thinking_tokens", *flags.SAMPLING, *flags.CONSTRAINTS),
    *("method", "drafting", "images"),
    max_new_tokens=512,
)
@flags.runtime_options("store")
def command(
    bundle: Path,
    system: str | None,
    drop_oldest: bool,
    variables: tuple[str, ...],
    runtime: LoadOptions,
    options: GenerateOptions,
) -> int:
    """Talk to BUNDLE's model, line by line; /help lists the commands."""
    with load(bundle, **runtime) as model:
        announce_first_run(model)
        images: list[PictureInput] = [*options.pop("images", ())]
        fields: GenerateOptions = {**model.defaults, **options}
        given = flags.parse_settings(variables, "template").items()
        template = {name: _parse_value(value) for name, value in given}
        talk = Conversation(model, system, drop_oldest, template=template, **fields)
        # Raises for a missing template or a bad option, before the first line is read.
        model.stream_reply(model.chat_prompt([user_message("")], **template), **fields)
        if sys.stdin.isatty():
            capacity = model.bundle.target.contract.capacity
            fact = f"{bundle.resolve().name}, {capacity} tokens of context"
            click.echo(f"{fact}; /help, Ctrl-D to leave", err=True)
            with contextlib.suppress(ImportError):
                import readline

                readline.parse_and_bind("set enable-bracketed-paste on")
        failed = False
        for line in iter(_read_message, None):
            if line.split()[:1] == ["/quit"]:
                break
            is_order = line.startswith("/") and "\n" not in line
            act = _run_command if is_order else _print_reply
            try:
                if line.strip():
                    act(talk, line, images)
            except JetdraftError as error:  # it ends no chat
                click.echo(f"error: {message_with_flags(error)}", err=True)
                failed = True
    return 2 if failed and not sys.stdin.isatty() else 0


def _parse_value(text: str) -> Any:
    """The value of a variable: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_message() -> str | None:
    """Read a message; None at the end of input, "" after Ctrl-C or a bad line."""
    try:
        return input("> ") if sys.stdin.isatty() else read_line()
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo("\nCtrl-D or /quit leaves", err=True)
        return ""
    except UnicodeDecodeError:  # of a terminal
        click.echo("error: the line is not UTF-8; write it again", err=True)
        return ""


def _print_reply(talk: Conversation, line: str, images: list[PictureInput]) -> None:
    """Print the model's reply, in a terminal its thought too; Ctrl-C ends it only."""
    shows_thoughts, after_thought = sys.stdout.isatty(), False
    with contextlib.suppress(KeyboardInterrupt):  # the reply so far is kept
        for piece in talk.say(line, images=images):
            if piece.thought and shows_thoughts:
                click.secho(piece.thought, nl=False, dim=True)
                after_thought = True
            if piece.text:
                click.echo("\n\n" * after_thought + piece.text, nl=False)
                after_thought = False
    images.clear()  # after an error they wait
    click.echo()


def _run_command(talk: Conversation, line: str, images: list[PictureInput]) -> None:
    order, *rest = line.split(maxsplit=1)
    if order == "/reset":
        talk.reset()
        images.clear()
    elif order == "/stats" and talk.last is not None:
        stats = talk.last.stats
        kept = f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens kept"
        click.echo(f"{stats_line(stats)}\n{kept}", err=True)
    elif order == "/stats":
        click.echo("there is no reply yet", err=True)
    elif order == "/image":
        images[:] = [*images, read_picture(rest[0])] if rest else []
    elif order in ("/save", "/load") and rest:
        (talk.save if order == "/save" else talk.load)(rest[0])
    else:
        is_known = order in ("/help", *HELP_TEXT.split())
        unknown = "" if is_known else f"no command {line!r}; there are\n"
        click.echo(unknown + HELP_TEXT, err=True)
