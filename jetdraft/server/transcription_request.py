"""A request for a transcript: a multipart form (RFC 7578), as OpenAI's API has it."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from math import inf
from typing import Any, Self

from starlette.responses import JSONResponse, PlainTextResponse, Response

from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.speech.segments import Transcript, srt, vtt
from jetdraft.runtime.speech.transcription import TranscribeOptions, Transcription
from jetdraft.runtime.text.stops import LENGTH, STOP
from jetdraft.server import RequestError

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")  # Values of response_format.
# Fields of a form that are read: texts, and numbers with their types.
FIELDS = ("file", "model", "language", "response_format", "timestamp_granularities[]")
NUMBER_FIELDS = {"temperature": float, "seed": int, "num_draft_tokens": int}
# Fields of OpenAI that would change the answer, and are not supported.
REFUSED_FIELDS = ("prompt", "include[]", "chunking_strategy")
MAX_FIELD_CHARS = 1000  # The most characters of a field that is not a file.
MAX_PARTS, MAX_HEAD_BYTES = 32, 4096  # Fields; bytes of a field's headers.


@dataclass(frozen=True)
class TranscriptionRequest:
    """A request for a transcript, read from a form.

    `data` is a WAV file, `model` the name of a model or None, `wanted` has language and
    task, `options` are keywords of `Model.transcription`, `form` is one of `FORMATS`.
    """

    data: bytes
    model: str | None
    wanted: TranscribeOptions
    options: dict[str, Any]
    form: str

    @classmethod
    def of(cls, fields: Mapping[str, Sequence[bytes]]) -> Self:
        """Check the fields that `read_form` returned; raises `JetdraftError`."""
        texts = {n: _field_text(n, v) for n, v in fields.items() if n != "file"}
        known = (*FIELDS, *NUMBER_FIELDS, *REFUSED_FIELDS, "method", "stream")
        for name, text in texts.items():
            if name not in known:
                raise RequestError(f"unknown field {name!r}; leave it out")
            if text and (
                name in REFUSED_FIELDS or (name == "stream" and text != "false")
            ):
                raise RequestError(f"{name} is not supported; leave it out", name)
        if len(fields.get("file", [])) != 1:
            raise RequestError("give one file, a WAV file", "file")
        if texts.get("timestamp_granularities[]", "segment") != "segment":
            raise RequestError(
                "only segments have timestamps; ask for segment",
                "timestamp_granularities[]",
            )
        form = texts.get("response_format", "json")
        if form not in FORMATS:
            raise RequestError(
                f"there is no format {form!r}; choose {', '.join(FORMATS)}",
                "response_format",
            )
        options: dict[str, Any] = {
            name: _field_number(name, texts[name], kind)
            for name, kind in NUMBER_FIELDS.items()
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
            TranscribeOptions(texts.get("language") or None),
            options,
            form,
        )

    @property
    def count(self) -> int:
        """The number of texts."""
        return 1

    @property
    def max_seconds(self) -> float:
        """The most seconds that the transcript may take, infinite without a limit."""
        return float(self.options.get("max_seconds", inf))

    def streams(self, model: Model) -> Iterator[Transcription]:
        """Start the only text; iterating over it yields segments as they come."""
        yield model.transcription(self.data, self.wanted, **self.options)

    def response(self, transcript: Transcript) -> Response:
        """Return the HTTP response with a transcript in the format `form`."""
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
                        "compression_ratio": _compression_ratio(segment.text.encode()),
                        "no_speech_prob": segment.no_speech_prob,
                    }
                    for number, segment in enumerate(transcript.segments)
                ],
            }
        return JSONResponse(fields)


def _compression_ratio(text: bytes) -> float:
    """Return the length of `text` over its length in zlib; high if it is repetitive."""
    return len(text) / len(zlib.compress(text))


def _field_text(name: str, values: Sequence[bytes]) -> str:
    """Decode the only value of a field; raises `RequestError`, also for two values."""
    try:
        [value] = values
        text = value.decode()
    except ValueError as error:
        raise RequestError(f"give {name!r} once, in UTF-8", name) from error
    if len(text) > MAX_FIELD_CHARS:
        raise RequestError(
            f"{name!r} is longer than {MAX_FIELD_CHARS} characters", name
        )
    return text


def _field_number(name: str, text: str, kind: type[float]) -> float:
    """Parse a field's text as `kind`, int or float; raises `RequestError`."""
    try:
        return kind(text)
    except ValueError as error:
        raise RequestError(
            f"{name} {text!r} is not a number; give one", name
        ) from error


def read_form(data: bytes | bytearray, content_type: str) -> dict[str, list[bytes]]:
    """Parse a multipart form: lists of values by field name; raises `RequestError`."""
    boundary = _header_parameter(content_type, "boundary")
    if not boundary or not boundary.isascii():
        raise _form_error("its content type has no boundary")
    delimiter = b"\r\n--" + boundary.encode()
    _, *parts = (b"\r\n" + data).split(delimiter, MAX_PARTS + 2)
    fields: dict[str, list[bytes]] = {}
    for part in parts[: MAX_PARTS + 1]:
        if part.startswith(b"--"):
            return fields
        head, separator, content = part.partition(b"\r\n\r\n")
        if not separator or len(head) > MAX_HEAD_BYTES:
            raise _form_error("a field has no headers")
        headers = BytesParser().parsebytes(head.lstrip(), headersonly=True)
        name = _header_parameter(str(headers["content-disposition"]), "name")
        if name is None:
            raise _form_error("a field has no name")
        fields.setdefault(name, []).append(content)
    raise _form_error("it does not end, or has too many fields")


def _header_parameter(header: str, name: str) -> str | None:
    """Return a parameter of a header; None if missing or encoded (RFC 7578, 4.2)."""
    message = Message()
    message["content-type"] = header
    try:
        value = message.get_param(name)
    except (ValueError, TypeError):  # what the library raises for wrong RFC 2231
        return None
    return value if isinstance(value, str) else None


def _form_error(reason: str) -> RequestError:
    return RequestError(f"the body is not a multipart form ({reason}); send a form")
