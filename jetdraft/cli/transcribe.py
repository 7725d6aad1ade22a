"""jetdraft transcribe: what is said in a WAV file."""

from pathlib import Path

import click

from jetdraft.cli import flags
from jetdraft.cli.command import Command, record_flags
from jetdraft.cli.console import announce_first_run, print_generation
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.options import GenerateOptions
from jetdraft.runtime.speech.segments import Segment, clock
from jetdraft.runtime.speech.transcription import TranscribeOptions

# Fields of a `Transcript` that --json prints.
RESULT_FIELDS = (
    *("text", "language", "seconds", "segments", "token_ids", "from_draft"),
    "finish_reason",
)


@click.command("transcribe", cls=Command)
@flags.bundle_argument
@click.argument("file", type=flags.PATH)
@record_flags("wanted", TranscribeOptions)
@flags.generate_options(*flags.SAMPLING, *flags.DRAFTING)
@flags.runtime_options()
@flags.json_option
@flags.explain_option
def command(
    bundle: Path,
    file: Path,
    wanted: TranscribeOptions,
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
    fields: GenerateOptions = {**model.defaults, **options}
    transcription = model.transcription(file, wanted, **fields)
    announce_first_run(model)

    def show(segment: Segment | None) -> None:
        if segment is not None:
            span = f"[{clock(segment.start)} --> {clock(segment.end)}] "
            click.echo(span * wanted.timestamps + segment.text.strip())

    return print_generation(transcription, show, RESULT_FIELDS, as_json, explain)
