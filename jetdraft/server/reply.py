"""Replies in the form of OpenAI's API: whole, or as server-sent events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from jetdraft.errors import JetdraftError, OptionError
from jetdraft.runtime.piece import Piece, Result
from jetdraft.runtime.sampling.chooser import Logprob
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.runtime.text.stops import DEADLINE, LENGTH, STOP
from jetdraft.server import RequestError, refusal_fields
from jetdraft.server.generation_request import GenerationRequest
from jetdraft.server.request_queue import Job

Json = dict[str, Any]
T = TypeVar("T")
STATUS_KEY = "jetdraft.status"  # In an ASGI scope: the final status of a stream.
# OpenAI's finish reasons by our finish reasons, for texts that were not cut.
_REASONS = {STOP: "stop", LENGTH: "length", DEADLINE: "length"}


class Reply:
    """Formats the pieces or the result of a request as OpenAI's JSON objects."""

    def __init__(
        self, request: GenerationRequest, name: str, codec: TextCodec, fingerprint: str
    ) -> None:
        self.request, self.codec = request, codec
        self.chat = request.prompt is None
        self._tools = request.tools if self.chat else None
        kind = "chatcmpl" if self.chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid4().hex}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": fingerprint,
            **({"service_tier": "default"} if self.chat else {}),
        }
        self._text, self._sent, self._sent_calls = "", 0, 0
        self._unsent_fields: dict[str, list[Any]] = {}
        self._text_offset = 0
        """The characters of the text before the next token, for text_offset."""

    def complete(self, result: Result) -> Json:
        """Return the object of a reply that is not streamed."""
        calls, said = self._read_calls(result.text)
        choice: Json = {"index": 0, "finish_reason": _finish_reason(result, calls)}
        if self.chat:
            message: Json = {"role": "assistant", "refusal": None}
            message["content"] = result.text
            if result.thought:
                message["reasoning_content"] = result.thought
            if calls:
                message |= {"content": said.strip() or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = result.text
        entries = zip(result.logprobs or [], result.texts, strict=False)
        choice["logprobs"] = self._logprobs_field(list(entries))
        if self.request.drafted:
            choice["tokens"] = _draft_marks(result.texts, result.from_draft)
        kind = "chat.completion" if self.chat else "text_completion"
        usage = _usage_field(result)
        return {**self._head, "object": kind, "choices": [choice], "usage": usage}

    def first_chunks(self) -> list[Json]:
        """Return the chunks before the text: the role in a chat, else []."""
        begun = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(begun)] if self.chat else []

    def piece_chunks(self, piece: Piece) -> list[Json]:
        """Return the chunks of a piece; keeps text that may belong to a tool call."""
        self._text += piece.text
        if "logprobs" in self.request.options:
            entries = zip(piece.logprobs, piece.texts, strict=True)
            self._unsent_fields.setdefault("logprobs", []).extend(entries)
        if self.request.drafted:
            flags = [i < piece.from_draft for i in range(len(piece.token_ids))]
            tokens = _draft_marks(piece.texts, flags)
            self._unsent_fields.setdefault("tokens", []).extend(tokens)
        chunks = []
        if piece.thought:
            thought = {"reasoning_content": piece.thought}
            chunks.append(self._chunk(thought, **self._take_fields()))
        chunks += self._text_chunks(self._sendable_length(self._text))
        return chunks + self._call_chunks()[0]

    def last_chunks(self, result: Result) -> list[Json]:
        """Return the last chunks: text kept or tool calls, finish reason, and usage."""
        chunks, calls, said = self._call_chunks()
        self._text = said.rstrip() if calls else said
        chunks += self._text_chunks(len(self._text))
        chunks.append(self._chunk({}, finish_reason=_finish_reason(result, calls)))
        if self.request.usage:
            chunks.append({**chunks[-1], "choices": [], "usage": _usage_field(result)})
        return chunks

    def _call_chunks(self) -> tuple[list[Json], list[Json], str]:
        """Return chunks of calls that became whole, all calls, and the other text."""
        calls, said = self._read_calls(self._text)
        chunks = []
        for index, call in enumerate(calls[self._sent_calls :], self._sent_calls):
            arguments = call["function"]["arguments"]
            call["function"] = {**call["function"], "arguments": ""}
            for part in (call, {"function": {"arguments": arguments}}):
                delta = {"tool_calls": [{"index": index, **part}]}
                chunks.append(self._chunk(delta, **self._take_fields()))
        self._sent_calls = len(calls)
        return chunks, calls, said

    def _text_chunks(self, end: int) -> list[Json]:
        """Return the chunk of the unsent text up to `end`, or []; marks it as sent."""
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        fields = self._take_fields() if text or end == len(self._text) else {}
        return [self._chunk({"content": text}, **fields)] if text or fields else []

    def _take_fields(self) -> Json:
        """Remove and return the unsent log probabilities and draft marks of tokens."""
        fields: Json = {name: v for name, v in self._unsent_fields.items() if v}
        self._unsent_fields = {}
        if "logprobs" in fields:
            fields["logprobs"] = self._logprobs_field(fields["logprobs"])
        return fields

    def _sendable_length(self, text: str) -> int:
        """Return how many characters at the start of a text belong to no tool call."""
        return len(text) if self._tools is None else self._tools.shown(text)

    def _chunk(self, delta: Json, **more: Any) -> Json:
        """Return a chunk with new content `delta`; `more` are fields of its choice."""
        choice: Json = {"index": 0, "finish_reason": None, "logprobs": None, **more}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = {"usage": None} if self.request.usage else {}
        return {**self._head, "object": kind, "choices": [choice], **usage}

    def _read_calls(self, text: str) -> tuple[list[Json], str]:
        """The tool calls in a text, as OpenAI's objects, and the text without them."""
        calls, said = ([], text) if self._tools is None else self._tools.read(text)
        return [call.for_openai() for call in calls], said

    def _logprobs_field(self, entries: Sequence[tuple[Logprob, str]]) -> Json | None:
        """Return the field logprobs for tokens and their texts; None if unwanted."""
        if not entries or "logprobs" not in self.request.options:
            return None
        if self.chat:
            content = [
                {
                    **self._token_entry(entry, entry.token, entry.logprob),
                    "top_logprobs": [
                        self._token_entry(entry, *top) for top in entry.top
                    ],
                }
                for entry, _ in entries
            ]
            return {"content": content, "refusal": None}
        lengths = (len(text) for _, text in entries)
        *places, self._text_offset = accumulate(lengths, initial=self._text_offset)
        return {
            "tokens": [self._name_of(entry, entry.token) for entry, _ in entries],
            "token_logprobs": [entry.logprob for entry, _ in entries],
            "top_logprobs": [self._logprobs_by_name(entry) for entry, _ in entries],
            "text_offset": places,
        }

    def _logprobs_by_name(self, entry: Logprob) -> dict[str, float]:
        """Return log probabilities by name: of the best tokens and the chosen token."""
        tops: dict[str, float] = {}
        for token, value in dict([*entry.top, (entry.token, entry.logprob)]).items():
            name = self._name_of(entry, token)
            # A better token may have the same name.
            tops[f"token_id:{token}" if name in tops else name] = value
        return tops

    def _token_entry(self, entry: Logprob, token: int, value: float) -> Json:
        """Return a chat's object for a token: name, log probability and bytes."""
        data = entry.names[token]
        exact = None if data is None else list(data)
        return {"token": self._name_of(entry, token), "logprob": value, "bytes": exact}

    def _name_of(self, entry: Logprob, token: int) -> str:
        """Return the text of a token; "bytes:..." for a part of a character."""
        data = entry.names[token]
        if data is None:
            return self.codec.token(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _draft_marks(texts: Sequence[str], flags: Sequence[bool]) -> list[Json]:
    return [
        {"text": text, "drafted": drafted}
        for text, drafted in zip(texts, flags, strict=True)
    ]


def _finish_reason(result: Result, calls: Sequence[Json]) -> str:
    """Return OpenAI's finish reason; raises `KeyError` for a text that was cut."""
    reason = _REASONS[result.finish_reason]
    return "tool_calls" if calls and reason == "stop" else reason


def _usage_field(result: Result) -> Json:
    """Return the field usage; drafted tokens count as OpenAI's predicted outputs."""
    stats = result.stats
    wrong = sum(stats.evaluated_by_position) - stats.accepted_tokens
    cached = {"cached_tokens": stats.reused_tokens, "audio_tokens": 0}
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.new_tokens,
        "total_tokens": stats.prompt_tokens + stats.new_tokens,
        "prompt_tokens_details": cached,
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(result.from_draft),
            "rejected_prediction_tokens": wrong,
            "audio_tokens": 0,
            "reasoning_tokens": stats.thought_tokens,
        },
    }


class EventStream:
    """An ASGI response that sends the pieces of a job as server-sent events.

    `first` is what `job.next` returned first. At the end `done` is called with the
    status: 200, the status of an error in the stream, or 499 if the client has left.
    """

    def __init__(
        self, job: Job, reply: Reply, first: Any, done: Callable[[int], None]
    ) -> None:
        self._job, self._reply, self._first, self._done = job, reply, first, done
        self._status = 499

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_events(send))
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.cancel()
            gone.cancel()
            sending.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            status = 500 if isinstance(sent, Exception) else self._status
            scope[STATUS_KEY] = status
            self._done(status)
        if isinstance(sent, Exception):
            raise sent

    async def _send_events(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for line in self._event_lines():
            data = f"data: {line}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _event_lines(self) -> AsyncIterator[str]:
        """Yield the data of each event: a chunk or an error as JSON, then [DONE]."""
        reply, piece = self._reply, self._first
        for chunk in reply.first_chunks():
            yield json.dumps(chunk)
        try:
            while not isinstance(piece, Result):
                for chunk in reply.piece_chunks(piece):
                    yield json.dumps(chunk)
                piece = await self._job.next()
            for chunk in reply.last_chunks(piece):
                yield json.dumps(chunk)
            self._status = 200
        except JetdraftError as error:
            usual = 400 if isinstance(error, OptionError) else 500
            self._status = getattr(error, "status", usual)
            yield json.dumps(refusal_fields(error, self._status))
        yield "[DONE]"


async def wait_unless_gone(receive: Receive, job: Job, wanted: Awaitable[T]) -> T:
    """Await `wanted`; if the client leaves first, cancel the job and raise an error."""
    waiting = asyncio.ensure_future(wanted)
    gone = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            job.cancel()
            raise RequestError("the client has gone", status=499)
        return waiting.result()
    except asyncio.CancelledError:
        job.cancel()
        raise
    finally:
        gone.cancel()
        waiting.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
