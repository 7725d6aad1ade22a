"""Requests that are answered whole: for a transcript, and for embeddings."""

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from typing import Any, Self

from starlette.responses import JSONResponse, PlainTextResponse, Response

from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import refusing
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.speech.segments import Segment, Transcript, srt, vtt
from jetdraft.runtime.speech.transcription import TranscribeOptions, Transcription
from jetdraft.runtime.stream import Embedder, Embeddings, normalized
from jetdraft.runtime.text.stops import DEADLINE, LENGTH, STOP
from jetdraft.server import RequestError
from jetdraft.server.generation_request import IGNORED_FIELDS, ModelRequest

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")  # Values of response_format.
# Fields of a form that are read: texts, and numbers with their types.
FIELDS = ("file", "model", "language", "response_format", "timestamp_granularities[]")
NUMBER_FIELDS = {"temperature": float, "seed": int, "num_draft_tokens": int}
REFUSED_FIELDS = ("prompt", "include[]", "chunking_strategy")
MAX_FIELD_CHARS = 1000  # The most characters of a field that is not a file.
MAX_PARTS, MAX_HEAD_BYTES = 32, 4096  # Fields; bytes of a field's headers.
# Of embeddings: the fields of a request, and the most texts, as with OpenAI.
EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions", "prompt_name")
MAX_INPUTS = 2048


@dataclass(frozen=True, kw_only=True)
class TranscriptionRequest(ModelRequest):
    """A request for a transcript, read from a form.

    `data` is a WAV file, `wanted` has language and task, `options` are keywords of
    `Model.transcription`, `form` is one of `FORMATS`.
    """

    data: bytes
    wanted: TranscribeOptions
    form: str

    @classmethod
    def of(cls, data: bytes | bytearray, content_type: str) -> Self:
        """Read and check the form in a body; raises `JetdraftError`."""
        fields = read_form(data, content_type)
        texts = {n: _field_text(n, v) for n, v in fields.items() if n != "file"}
        known = (*FIELDS, *NUMBER_FIELDS, *REFUSED_FIELDS, "method", "stream")
        for name, text in texts.items():
            _refuse_if(name not in known, f"unknown field {name!r}; leave it out")
            is_stream = name == "stream" and text not in ("", "false")
            is_refused = is_stream or (name in REFUSED_FIELDS and text != "")
            _refuse_if(is_refused, f"{name} is not supported; leave it out", name)
        is_single = len(fields.get("file", [])) == 1
        _refuse_if(not is_single, "give one file, a WAV file", "file")
        timed = "timestamp_granularities[]"
        fact = "only segments have timestamps; ask for segment"
        _refuse_if(texts.get(timed, "segment") != "segment", fact, timed)
        form = texts.get("response_format", "json")
        fact = f"there is no format {form!r}; choose {', '.join(FORMATS)}"
        _refuse_if(form not in FORMATS, fact, "response_format")
        options: dict[str, Any] = {}
        for name, kind in NUMBER_FIELDS.items():
            if number := texts.get(name):
                fact = f"{name} {number!r} is not a number; give one"
                with refusing(RequestError(fact, name), ValueError):
                    options[name] = kind(number)
        if texts.get("method"):
            options["method"] = texts["method"]
        if form == "verbose_json":
            options["logprobs"] = 0
        Options.of(**options)  # refuses bad options
        return cls(
            data=fields["file"][0],
            model=texts.get("model", ""),
            wanted=TranscribeOptions(texts.get("language") or None),
            options=options,
            form=form,
        )

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
            numbered = enumerate(transcript.segments)
            fields |= {
                **{"task": self.wanted.task, "language": transcript.language},
                "duration": transcript.seconds,
                "segments": [self._entry(number, part) for number, part in numbered],
            }
        return JSONResponse(fields)

    def _entry(self, number: int, segment: Segment) -> dict[str, Any]:
        data = segment.text.encode()
        return {
            "id": number,
            "seek": round(100 * segment.window),  # frames of 10 ms
            **{"start": segment.start, "end": segment.end, "text": segment.text},
            "tokens": segment.token_ids,
            "temperature": self.options.get("temperature", 0.0),
            "avg_logprob": segment.avg_logprob,
            "compression_ratio": len(data) / len(zlib.compress(data)),
            "no_speech_prob": segment.no_speech_prob,
        }


def _refuse_if(is_wrong: bool, fact: str, field: str | None = None) -> None:
    if is_wrong:
        raise RequestError(fact, field)


def _field_text(name: str, values: Sequence[bytes]) -> str:
    with refusing(RequestError(f"give {name!r} once, in UTF-8", name), ValueError):
        [value] = values
        text = value.decode()
    fact = f"{name!r} is longer than {MAX_FIELD_CHARS} characters"
    _refuse_if(len(text) > MAX_FIELD_CHARS, fact, name)
    return text


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


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest(ModelRequest):
    """A request for the embeddings of texts, which may be token ids.

    An embedding is cut to `dimensions` numbers, and has the length 1 again. `as_bytes`
    asks for base64 of little-endian float32.
    """

    texts: list[str | list[int]]
    prompt_name: str | None
    as_bytes: bool
    dimensions: int | None

    @classmethod
    def of(cls, body: Mapping[str, Any], max_seconds: float) -> Self:
        """Check the body of a request; raises `RequestError`."""
        form, size = body.get("encoding_format", "float"), body.get("dimensions")
        texts, name = _as_texts(body.get("input")), body.get("prompt_name")
        more = [field for field in body if field not in EMBEDDING_FIELDS]
        for field in more:
            fact = f"unknown field {field!r}; leave it out"
            _refuse_if(field not in IGNORED_FIELDS, fact, field)
        fact = f"encoding_format {form!r} is unknown; choose float or base64"
        _refuse_if(form not in ("float", "base64"), fact, "encoding_format")
        is_wrong = size is not None and (type(size) is not int or size < 1)
        fact = f"dimensions {size!r} is not a number from 1 on"
        _refuse_if(is_wrong, fact, "dimensions")
        fact = f"prompt_name {name!r} is not a text"
        _refuse_if(not isinstance(name, str | None), fact, "prompt_name")
        fact = f"give a text, a list of 1 to {MAX_INPUTS} texts, or token ids"
        _refuse_if(not texts, fact, "input")
        return cls(
            texts=texts,
            prompt_name=name,
            as_bytes=form == "base64",
            dimensions=size,
            options={"max_seconds": max_seconds},
            ignored=more,
        )

    def streams(self, model: Model) -> Iterator[Embedder]:
        """Start to embed; iterating over it yields a piece for each text."""
        embedder = model.embedder(self.texts, self.prompt_name, self.max_seconds)
        width, size = model.parts.target.contract.feature_size, self.dimensions
        fact = f"the model's embeddings have {width} dimensions; ask for 1 to {width}"
        _refuse_if(size is not None and not 1 <= size <= width, fact, "dimensions")
        yield embedder

    def answer(self, model: str, result: Embeddings) -> dict[str, Any]:
        """Return OpenAI's list of embeddings; raises `RequestError` if it was cut."""
        fact = f"the texts took more than {self.max_seconds:g} s; send fewer"
        _refuse_if(result.finish_reason == DEADLINE, fact, "input")
        vectors = normalized(result.vectors[:, : self.dimensions]).astype("<f4")
        entries = [
            {"object": "embedding", "index": place, "embedding": self._written(vector)}
            for place, vector in enumerate(vectors)
        ]
        usage = dict.fromkeys(("prompt_tokens", "total_tokens"), result.prompt_tokens)
        return {"object": "list", "data": entries, "model": model, "usage": usage}

    def _written(self, vector: Float32s) -> Any:
        data = vector.tobytes()
        return base64.b64encode(data).decode() if self.as_bytes else vector.tolist()


def _as_texts(given: Any) -> list[str | list[int]]:
    """Return the texts, or lists of ids, of an input; [] for something else."""

    def is_text(value: Any) -> bool:
        is_ids = isinstance(value, list) and all(type(id) is int for id in value)
        return is_ids or isinstance(value, str)

    texts = [given] if given and is_text(given) else given
    if not isinstance(texts, list) or len(texts) > MAX_INPUTS:
        return []
    return texts if all(map(is_text, texts)) else []
