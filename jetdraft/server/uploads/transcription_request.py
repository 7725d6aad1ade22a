"""A request for a transcript, in the form of OpenAI's API."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Self

from starlette.responses import JSONResponse, PlainTextResponse, Response

from jetdraft.runtime.hearing.segments import srt, vtt
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.text.stops import LENGTH, STOP
from jetdraft.runtime.transcript import Transcript
from jetdraft.runtime.transcription import Transcription, Wanted
from jetdraft.server.generation_request import RequestError

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
READ = ("file", "model", "language", "response_format", "timestamp_granularities[]")
NUMBERS = {"temperature": float, "seed": int, "num_draft_tokens": int}
REFUSED = ("prompt", "include[]", "chunking_strategy")
"""Fields of OpenAI that would change the answer, and are not supported."""

LONGEST = 1000
"""The most characters of a field that is not a file."""


@dataclass(frozen=True)
class TranscriptionRequest:
    """A WAV file, what to write of it, with which options, and the answer's form.

    TranscriptionRequest.of({"file": [data], "model": [b"whisper"]})
    """

    data: bytes
    model: str | None
    wanted: Wanted
    options: dict[str, Any]
    form: str

    @classmethod
    def of(cls, fields: Mapping[str, Sequence[bytes]]) -> Self:
        """Read the fields of a form; raises `JetdraftError`."""
        texts = {n: _text(n, v) for n, v in fields.items() if n != "file"}
        known = (*READ, *NUMBERS, *REFUSED, "method", "stream")
        for name, text in texts.items():
            if name not in known:
                raise RequestError(f"unknown field {name!r}; leave it out")
            if text and (name in REFUSED or (name == "stream" and text != "false")):
                raise RequestError(f"{name} is not supported; leave it out", name)
        if len(fields.get("file", [])) != 1:
            raise RequestError("give one file, a WAV file", "file")
        if texts.get("timestamp_granularities[]", "segment") != "segment":
            raise RequestError(
                "timestamps are those of segments; ask for segment",
                "timestamp_granularities[]",
            )
        form = texts.get("response_format", "json")
        if form not in FORMATS:
            raise RequestError(
                f"there is no format {form!r}; choose {', '.join(FORMATS)}",
                "response_format",
            )
        options: dict[str, Any] = {
            name: _number(name, texts[name], kind)
            for name, kind in NUMBERS.items()
            if texts.get(name)
        }
        if texts.get("method"):
            options["method"] = texts["method"]
        if form == "verbose_json":
            options["logprobs"] = 0
        Options.of(**options)  # refuses bad options
        return cls(
            fields["file"][0],
            texts.get("model"),
            Wanted(texts.get("language") or None),
            options,
            form,
        )

    @property
    def seconds(self) -> float:
        """Return the most seconds that the transcript may take."""
        return float(self.options.get("max_seconds", inf))

    def stream(self, model: Model) -> Transcription:
        """Start the transcription."""
        return model.transcription(self.data, self.wanted, **self.options)

    def response(self, transcript: Transcript) -> Response:
        """The answer in the form that was asked for."""
        if self.form == "srt":
            return PlainTextResponse(srt(transcript.segments))
        if self.form == "vtt":
            return PlainTextResponse(vtt(transcript.segments), media_type="text/vtt")
        if self.form == "text":
            return PlainTextResponse(transcript.text + "\n")
        usage = {"type": "duration", "seconds": round(transcript.seconds)}
        fields: dict[str, Any] = {"text": transcript.text, "usage": usage}
        if transcript.finish_reason != STOP:  # a text that was cut, as in a chat
            fields["finish_reason"] = LENGTH
        if self.form == "verbose_json":
            temperature = self.options.get("temperature", 0.0)
            fields |= {
                "task": self.wanted.task,
                "language": transcript.language,
                "duration": transcript.seconds,
                "segments": [
                    {
                        "id": number,
                        "seek": round(100 * segment.window),  # frames of 10 ms
                        "start": segment.start,
                        "end": segment.end,
                        "text": segment.text,
                        "tokens": segment.token_ids,
                        "temperature": temperature,
                        "avg_logprob": segment.avg_logprob,
                        "compression_ratio": _repetition(segment.text.encode()),
                        "no_speech_prob": segment.no_speech_prob,
                    }
                    for number, segment in enumerate(transcript.segments)
                ],
            }
        return JSONResponse(fields)


def _repetition(text: bytes) -> float:
    """Return how many times smaller a text becomes when it is compressed."""
    return len(text) / len(zlib.compress(text))


def _text(name: str, values: Sequence[bytes]) -> str:
    try:
        [value] = values
        text = value.decode()
    except ValueError as error:
        raise RequestError(f"give {name!r} once, in UTF-8", name) from error
    if len(text) > LONGEST:
        raise RequestError(f"{name!r} is longer than {LONGEST} characters", name)
    return text


def _number(name: str, text: str, kind: type[float]) -> float:
    try:
        return kind(text)
    except ValueError as error:
        raise RequestError(
            f"{name} {text!r} is not a number; give one", name
        ) from error
