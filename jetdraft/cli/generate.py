"""jetdraft generate: a text from a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from jetdraft.errors import OptionError
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.passes.load_options import LoadOptions
from jetdraft.runtime.piece import Result
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.text.stops import INTERRUPTED
from jetdraft.runtime.text.template import user as user_message
from jetdraft.runtime.text_stream import Stream
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.first_run import announce_first_run
from jetdraft.terminal.flags import (
    PATH,
    bundle_argument,
    constraint_options,
    drafting_options,
    exit_option,
    explain_option,
    generate_fields,
    json_option,
    new_tokens_option,
    runtime_options,
    sampling_options,
    store_option,
)
from jetdraft.terminal.prompts import read_prompt
from jetdraft.terminal.summary import explanation, summary


@click.command("generate", cls=Command)
@bundle_argument
@click.argument("text", required=False)
@option("prompt", "-p", "--prompt", help='The prompt; "-" reads standard input.')
@option(
    "prompt", "--prompt-file", type=PATH, help="Read the prompt from this UTF-8 file."
)
@option(
    "prompt",
    "--raw",
    is_flag=True,
    help="Continue the prompt as it is, without the checkpoint's chat template.",
)
@new_tokens_option(128)
@option(
    "ending",
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End before this text; may be given several times.",
)
@option("ending", "--ignore-eos", is_flag=True, help="Continue past end of text.")
@sampling_options
@option(
    "sampling",
    "--repetition-penalty",
    type=float,
    help="Divide the logits of earlier tokens by this; 1 is off. Default: the "
    "checkpoint's own, or 1.",
)
@constraint_options
@drafting_options()
@exit_option
@store_option
@runtime_options
@json_option
@explain_option
def command(
    bundle: Path,
    text: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    raw: bool,
    as_json: bool,
    explain: bool,
    runtime: LoadOptions,
    store: Path | None,
    **options: Any,
) -> int:
    """Generate a text with BUNDLE after the prompt TEXT, or as --prompt gives it.

    An encoder-decoder writes about the prompt: it translates it, or sums it up. If the
    checkpoint has a chat template, the prompt is a user's message and the text is the
    reply; --raw continues the prompt itself.
    """
    if text is not None and prompt is not None:
        raise click.UsageError("give the prompt once, as TEXT or with --prompt")
    text = read_prompt(prompt if text is None else text, prompt_file)
    runtime["store"] = store
    model = load(bundle, **runtime)
    announce_first_run(model)
    stream = _stream(model, text, raw, generate_fields(options, model))
    interrupted = False
    try:
        for piece in stream:
            if not as_json:
                click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        interrupted = True
        stream.close(INTERRUPTED)
    result = stream.result()
    if as_json:
        click.echo(_as_json(result))
    else:
        click.echo()
        click.echo(summary(result.stats), err=True)
    if explain:
        click.echo(explanation(result.stats), err=True)
    return 130 if interrupted else 0


def _stream(model: Model, text: str, raw: bool, options: GenerateOptions) -> Stream:
    """Start a reply to `text`, or its continuation."""
    if not text:
        raise OptionError("the prompt is empty; give some text", "prompt")
    if raw or model.bundle.chat_template is None:
        return model.stream(text, **options)
    ids = model.chat_prompt([user_message(text)])
    return model.stream(token_ids=ids, **options)


def _as_json(result: Result) -> str:
    fields = {
        "text": result.text,
        "token_ids": result.token_ids,
        "from_draft": result.from_draft,
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }
    return json.dumps(fields)  # ASCII, since other encodings than UTF-8 are not JSON
