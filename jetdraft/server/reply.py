"""Replies in the form of OpenAI's API: whole, or as server-sent events."""

from __future__ import annotations

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
from jetdraft.server.desk import Job
from jetdraft.server.generation_request import GenerationRequest
from jetdraft.server.refusal import RequestError, refusal_fields

Json = dict[str, Any]
T = TypeVar("T")

STATUS = "jetdraft.status"
"""Where the scope of a request has how its stream ended, which began with 200."""

_REASONS = {STOP: "stop", LENGTH: "length", DEADLINE: "length"}
"""OpenAI's finish reasons of texts that are whole, or as long as they may be."""


class Reply:
    """Turns the pieces and the result of one request into JSON objects.

    `name` is the model's name, `fingerprint` a name of all that its texts depend on.
    """

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
        self._text, self._sent = "", 0
        self._extras: dict[str, list[Any]] = {}
        self._place = 0
        """Where the next token's text begins, in characters of the text."""

    def whole(self, result: Result) -> Json:
        """The reply in one object."""
        calls = self._calls(result.text)
        choice: Json = {"index": 0, "finish_reason": _reason(result, calls)}
        if self.chat:
            message: Json = {"role": "assistant", "refusal": None}
            message["content"] = result.text
            if calls:
                before = result.text[: self._shown(result.text)].strip()
                message |= {"content": before or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = result.text
        entries = zip(result.logprobs or [], result.texts, strict=False)
        choice["logprobs"] = self._logprobs(list(entries))
        if self.request.drafted:
            choice["tokens"] = _drafted(result.texts, result.from_draft)
        kind = "chat.completion" if self.chat else "text_completion"
        usage = _usage(result)
        return {**self._head, "object": kind, "choices": [choice], "usage": usage}

    def first(self) -> list[Json]:
        """The chunks before the text."""
        begun = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(begun)] if self.chat else []

    def piece(self, piece: Piece) -> list[Json]:
        """The chunks of a round's text, without text that may be a tool call."""
        self._text += piece.text
        if "logprobs" in self.request.options:
            entries = zip(piece.logprobs, piece.texts, strict=True)
            self._extras.setdefault("logprobs", []).extend(entries)
        if self.request.drafted:
            flags = [i < piece.from_draft for i in range(len(piece.token_ids))]
            tokens = _drafted(piece.texts, flags)
            self._extras.setdefault("tokens", []).extend(tokens)
        return self._content(self._shown(self._text))

    def last(self, result: Result) -> list[Json]:
        """The chunks after the text."""
        calls = self._calls(self._text)
        chunks = [] if calls else self._content(len(self._text))
        for index, call in enumerate(calls):
            arguments = call["function"]["arguments"]
            call["function"] = {**call["function"], "arguments": ""}
            for part in (call, {"function": {"arguments": arguments}}):
                delta = {"tool_calls": [{"index": index, **part}]}
                chunks.append(self._chunk(delta, **self._taken()))
        chunks.append(self._chunk({}, finish_reason=_reason(result, calls)))
        if self.request.usage:
            chunks.append({**chunks[-1], "choices": [], "usage": _usage(result)})
        return chunks

    def _content(self, end: int) -> list[Json]:
        """The unsent text before `end`, with the extras of its tokens."""
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        extras = self._taken() if text or end == len(self._text) else {}
        return [self._chunk({"content": text}, **extras)] if text or extras else []

    def _taken(self) -> Json:
        """The extras that were not sent yet: log probabilities and draft marks."""
        extras: Json = {name: items for name, items in self._extras.items() if items}
        self._extras = {}
        if "logprobs" in extras:
            extras["logprobs"] = self._logprobs(extras["logprobs"])
        return extras

    def _shown(self, text: str) -> int:
        """How many characters of a text cannot be part of a tool call."""
        return len(text) if self._tools is None else self._tools.shown(text)

    def _chunk(self, delta: Json, **more: Any) -> Json:
        choice: Json = {"index": 0, "finish_reason": None, "logprobs": None, **more}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = {"usage": None} if self.request.usage else {}
        return {**self._head, "object": kind, "choices": [choice], **usage}

    def _calls(self, text: str) -> list[Json]:
        calls = [] if self._tools is None else self._tools.calls(text)
        return [call.for_openai() for call in calls]

    def _logprobs(self, entries: Sequence[tuple[Logprob, str]]) -> Json | None:
        """Log probabilities, from pairs with the text that a token completed."""
        if not entries or "logprobs" not in self.request.options:
            return None
        if self.chat:
            content = [
                {
                    **self._token(entry, entry.token, entry.logprob),
                    "top_logprobs": [self._token(entry, *top) for top in entry.top],
                }
                for entry, _ in entries
            ]
            return {"content": content, "refusal": None}
        lengths = (len(text) for _, text in entries)
        *places, self._place = accumulate(lengths, initial=self._place)
        return {
            "tokens": [self._name(entry, entry.token) for entry, _ in entries],
            "token_logprobs": [entry.logprob for entry, _ in entries],
            "top_logprobs": [self._by_name(entry) for entry, _ in entries],
            "text_offset": places,
        }

    def _by_name(self, entry: Logprob) -> dict[str, float]:
        """The best tokens by name, and the chosen token if it is not the best."""
        tops: dict[str, float] = {}
        for token, value in dict([*entry.top, (entry.token, entry.logprob)]).items():
            name = self._name(entry, token)
            # A better token may have the same name.
            tops[f"token_id:{token}" if name in tops else name] = value
        return tops

    def _token(self, entry: Logprob, token: int, value: float) -> Json:
        data = entry.names[token]
        exact = None if data is None else list(data)
        return {"token": self._name(entry, token), "logprob": value, "bytes": exact}

    def _name(self, entry: Logprob, token: int) -> str:
        """A token's text at its place; OpenAI writes parts of characters so."""
        data = entry.names[token]
        if data is None:
            return self.codec.token(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _drafted(texts: Sequence[str], flags: Sequence[bool]) -> list[Json]:
    return [
        {"text": text, "drafted": drafted}
        for text, drafted in zip(texts, flags, strict=True)
    ]


def _reason(result: Result, calls: Sequence[Json]) -> str:
    """OpenAI's finish reason; it has none for a text that was cancelled."""
    reason = _REASONS[result.finish_reason]
    return "tool_calls" if calls and reason == "stop" else reason


def _usage(result: Result) -> Json:
    """The counts; drafted tokens have OpenAI's names for predicted outputs."""
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
            "reasoning_tokens": 0,
        },
    }


class Events:
    """Server-sent events: a job's pieces as they come, until the client goes away.

    `first` is the job's first piece or its result; `done` gets the status at the end.
    """

    def __init__(
        self, job: Job, reply: Reply, first: Any, done: Callable[[int], None]
    ) -> None:
        self._job, self._reply, self._first, self._done = job, reply, first, done
        self._status = 499

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._job.cancel()
            gone.cancel()
            sending.cancel()
            sent, _ = await asyncio.gather(sending, gone, return_exceptions=True)
            status = 500 if isinstance(sent, Exception) else self._status
            scope[STATUS] = status
            self._done(status)
        if isinstance(sent, Exception):
            raise sent

    async def _send(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for line in self._lines():
            data = f"data: {line}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncIterator[str]:
        reply, piece = self._reply, self._first
        for chunk in reply.first():
            yield json.dumps(chunk)
        try:
            while not isinstance(piece, Result):
                for chunk in reply.piece(piece):
                    yield json.dumps(chunk)
                piece = await self._job.next()
            for chunk in reply.last(piece):
                yield json.dumps(chunk)
            self._status = 200
        except JetdraftError as error:
            usual = 400 if isinstance(error, OptionError) else 500
            self._status = getattr(error, "status", usual)
            yield json.dumps(refusal_fields(error, self._status))
        yield "[DONE]"


async def unless_gone(receive: Receive, job: Job, wanted: Awaitable[T]) -> T:
    """Wait for `wanted` of a job; cancel the job if the client goes away."""
    waiting = asyncio.ensure_future(wanted)
    gone = asyncio.create_task(_gone(receive))
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
