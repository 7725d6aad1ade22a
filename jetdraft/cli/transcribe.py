"""jetdraft transcribe: what is said in a WAV file."""

from functools import partial
from pathlib import Path

import click

from jetdraft.cli import flags
from jetdraft.cli.command import Command, option
from jetdraft.cli.console import announce_first_run, print_generation
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.speech.segments import Segment, clock
from jetdraft.runtime.speech.transcription import TRANSCRIBE, TranscribeOptions

# Fields of a `Transcript` that --json prints.
RESULT_FIELDS = (
    *("text", "language", "seconds", "segments", "token_ids", "from_draft"),
    "finish_reason",
)


@click.command("transcribe", cls=Command)
@flags.bundle_argument
@click.argument("file", type=flags.PATH)
@option(
    "prompt",
    "--language",
    help='The language that is spoken, for example "de"; default: detect it.',
)
@option(
    "prompt",
    "--task",
    default=TRANSCRIBE,
    show_default=True,
    help="transcribe, or translate into English.",
)
@option(
    "prompt",
    "--timestamps/--no-timestamps",
    default=True,
    show_default=True,
    help="Let the model write timestamps; windows of a long file then end where a "
    "sentence ends.",
)
@flags.generate_options(*flags.SAMPLING, *flags.DRAFTING)
@flags.runtime_options()
@flags.json_option
@flags.explain_option
def command(
    bundle: Path,
    file: Path,
    language: str | None,
    task: str,
    timestamps: bool,
    as_json: bool,
    explain: bool,
    runtime: LoadOptions,
    options: GenerateOptions,
) -> int:
    """Write down what is said in the WAV file FILE, with BUNDLE of a Whisper.

    Each segment is a line with its times, or, without timestamps, each window of 30
    seconds is a line.
    """
    model = load(bundle, **runtime)
    wanted = TranscribeOptions(language, task, timestamps)
    fields = flags.with_defaults(options, model)
    transcription = model.transcription(file, wanted, **fields)
    announce_first_run(model)
    show = partial(_print_segment, timestamps=timestamps)
    return print_generation(transcription, show, RESULT_FIELDS, as_json, explain)


def _print_segment(segment: Segment | None, timestamps: bool) -> None:
    if segment is None:
        return
    times = f"[{clock(segment.start)} --> {clock(segment.end)}] " if timestamps else ""
    click.echo(times + segment.text.strip())
