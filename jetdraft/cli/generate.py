"""jetdraft generate: a text from a bundle."""

from pathlib import Path

import click

from jetdraft.cli import flags
from jetdraft.cli.command import Command, option
from jetdraft.cli.console import announce_first_run, print_generation, read_input
from jetdraft.errors import OptionError
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.piece import Piece
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.text.template import user_message

RESULT_FIELDS = ("text", "token_ids", "from_draft", "prompt_tokens", "finish_reason")


@click.command("generate", cls=Command)
@flags.bundle_argument
@click.argument("text", required=False)
@option("prompt -p --prompt", 'The prompt; "-" reads standard input.')
@option(
    "prompt --prompt-file", "Read the prompt from this UTF-8 file.", type=flags.PATH
)
@option(
    "prompt --raw",
    "Continue the prompt as it is, without the checkpoint's chat template.",
    is_flag=True,
)
@flags.generate_options(
    *("max_new_tokens", "stop", "ignore_eos", "repetition_penalty", "images"),
    *(*flags.SAMPLING, *flags.CONSTRAINTS, *flags.DRAFTING),
    max_new_tokens=128,
)
@flags.runtime_options("store")
@flags.json_option
@flags.explain_option
def command(
    bundle: Path,
    text: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    raw: bool,
    as_json: bool,
    explain: bool,
    runtime: LoadOptions,
    options: GenerateOptions,
) -> int:
    """Generate a text with BUNDLE after the prompt TEXT, or as --prompt gives it.

    An encoder-decoder writes about the prompt: it translates it, or sums it up. If the
    checkpoint has a chat template, the prompt is a user's message and the text is the
    reply; --raw continues the prompt itself.
    """
    if text is not None and prompt is not None:
        raise click.UsageError("give the prompt once, as TEXT or with --prompt")
    text = prompt if text is None else text
    if (text is None) == (prompt_file is None):
        raise click.UsageError("give one prompt: TEXT, --prompt or --prompt-file")
    if text is None or text == "-":
        text = read_input(prompt_file)
    model = load(bundle, **runtime)
    announce_first_run(model)
    fields: GenerateOptions = {**model.defaults, **options}
    if not text:
        raise OptionError("the prompt is empty; give some text", "prompt")
    if raw or model.bundle.chat_template is None:
        stream = model.stream(text, **fields)
    else:
        ids = model.chat_prompt([user_message(text, options.get("images", ()))])
        stream = model.stream(token_ids=ids, **fields)

    def show(piece: Piece | None) -> None:
        click.echo("" if piece is None else piece.text, nl=piece is None)

    return print_generation(stream, show, RESULT_FIELDS, as_json, explain)
