"""jetdraft transcribe: what is said in a WAV file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from jetdraft.runtime.hearing.segments import Segment, clock
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.load_options import LoadOptions
from jetdraft.runtime.text.stops import INTERRUPTED
from jetdraft.runtime.transcript import Transcript
from jetdraft.runtime.transcription import TRANSCRIBE, Wanted
from jetdraft.terminal.command import Command, option
from jetdraft.terminal.first_run import announce_first_run
from jetdraft.terminal.flags import (
    PATH,
    bundle_argument,
    drafting_options,
    explain_option,
    generate_fields,
    json_option,
    runtime_options,
    sampling_options,
)
from jetdraft.terminal.summary import explanation, summary


@click.command("transcribe", cls=Command)
@bundle_argument
@click.argument("file", type=PATH)
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
@sampling_options
@drafting_options()
@runtime_options
@json_option
@explain_option
def command(
    bundle: Path,
    file: Path,
    language: str | None,
    task: str,
    timestamps: bool,
    as_json: bool,
    explain: bool,
    runtime: LoadOptions,
    **options: Any,
) -> int:
    """Write down what is said in the WAV file FILE, with BUNDLE of a Whisper.

    Each segment is a line with its times, or, without timestamps, each window of 30
    seconds is a line.
    """
    model = load(bundle, **runtime)
    wanted = Wanted(language, task, timestamps)
    fields = generate_fields(options, model)
    transcription = model.transcription(file, wanted, **fields)
    announce_first_run(model)
    interrupted = False
    try:
        for segment in transcription:
            if not as_json:
                click.echo(_line(segment, timestamps))
    except KeyboardInterrupt:
        interrupted = True
        transcription.close(INTERRUPTED)
    result = transcription.result()
    if as_json:
        click.echo(_as_json(result))
    else:
        click.echo(summary(result.stats), err=True)
    if explain:
        click.echo(explanation(result.stats), err=True)
    return 130 if interrupted else 0


def _line(segment: Segment, timestamps: bool) -> str:
    times = f"[{clock(segment.start)} --> {clock(segment.end)}] " if timestamps else ""
    return times + segment.text.strip()


def _as_json(result: Transcript) -> str:
    fields = {
        "text": result.text,
        "language": result.language,
        "seconds": result.seconds,
        "segments": [vars(segment) for segment in result.segments],
        "token_ids": result.token_ids,
        "from_draft": result.from_draft,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }
    return json.dumps(fields)  # ASCII, since other encodings than UTF-8 are not JSON
