"""Replies in the form of OpenAI's API, whole or in chunks; and dialects of it."""

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any
from uuid import uuid4

from starlette.responses import StreamingResponse
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
Chunks = AsyncIterator[Json]
Read = Callable[[Json], tuple[Json, bool]]
write_event = partial(json.dumps, separators=(",", ":"))  # Of a stream.
STATUS_KEY = "jetdraft.status"  # In an ASGI scope: the final status of a stream.
# OpenAI's finish reasons by our finish reasons, for texts that were not cut.
_REASONS = {STOP: "stop", LENGTH: "length", DEADLINE: "length"}


class Reply:
    """Formats the pieces or the results of a request as OpenAI's JSON objects.

    `asked` is the body of the request in the words of its own API. `results` are the
    texts that have ended, `reason` is OpenAI's finish reason of the last, `whole_calls`
    how many calls it has that are not broken, and `status` the HTTP status of an error
    in a stream. With `begun_calls` a stream has calls while they are written.
    """

    def __init__(
        self,
        request: GenerationRequest,
        name: str,
        codec: TextCodec,
        fingerprint: str,
        asked: Json | None = None,
        begun_calls: bool = True,
    ) -> None:
        self.request, self.codec = request, codec
        self.name, self.asked = name, asked or {}
        self.id, self.created = uuid4().hex, int(time.time())
        self.results, self.reason, self.status = list[Result](), "", 200
        self.chat = not request.prompts
        self._tools = request.tools if self.chat else None
        self.whole_calls, self._begun_calls = 0, begun_calls
        kind = "chatcmpl" if self.chat else "cmpl"
        self._head = {
            **{"id": f"{kind}-{self.id}", "created": self.created},
            **{"model": name, "system_fingerprint": fingerprint},
            **({"service_tier": "default"} if self.chat else {}),
        }
        self._begin()

    @property
    def usage(self) -> Json:
        """Usage of ended texts: a prompt counts once, drafts as predicted outputs."""
        results, stats = self.results, [result.stats for result in self.results]
        prompts = stats[:: self.request.n]
        asked = sum(s.prompt_tokens for s in prompts)
        written = sum(s.new_tokens for s in stats)
        wrong = sum(sum(s.evaluated_by_position) - s.accepted_tokens for s in stats)
        cached = sum(s.reused_tokens for s in prompts)
        return {
            **{"prompt_tokens": asked, "completion_tokens": written},
            "total_tokens": asked + written,
            "prompt_tokens_details": {
                **{"cached_tokens": cached, "audio_tokens": 0},
                "image_tokens": sum(s.picture_tokens for s in prompts),
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(sum(r.from_draft) for r in results),
                "rejected_prediction_tokens": wrong,
                "audio_tokens": 0,
                "reasoning_tokens": sum(s.thought_tokens for s in stats),
            },
        }

    @property
    def stop_text(self) -> str | None:
        """The text in `stop` that ended the last text; None for another end."""
        stops, texts = self.request.options.get("stop") or [], self.results[-1].texts
        listed = [stops] if isinstance(stops, str) else stops
        whole, before = "".join(texts), len("".join(texts[:-1]))
        # The last token completed it. A thought may have the same text.
        ends = ((stop, whole[max(0, before + 1 - len(stop)) :]) for stop in listed)
        return next((stop for stop, end in ends if stop in end), None)

    def _begin(self) -> None:
        self._index, self._text = len(self.results), ""
        self._sent, self._sent_calls = 0, list[int]()  # Characters, of each call too.
        self._unsent_fields: dict[str, list[Any]] = {}
        # The characters of the text before the next token, for text_offset.
        self._text_offset = 0

    def complete(self, results: Sequence[Result]) -> Json:
        """Return the object of a reply that is not streamed."""
        choices = [self._choice(result) for result in results]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    def _choice(self, result: Result) -> Json:
        self._begin()
        calls, said = self._read_calls(result.text)
        self.whole_calls = len(calls)
        self._end(result, calls)
        choice: Json = {"index": self._index, "finish_reason": self.reason}
        if self.chat:
            message: Json = {"role": "assistant", "refusal": None}
            message["content"] = result.text
            if result.thought:
                message["reasoning_content"] = result.thought
            if calls:
                message |= {"content": said.rstrip() or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = self._echo() + result.text
        entries = zip(result.logprobs or [], result.texts, strict=False)
        choice["logprobs"] = self._logprobs_field(list(entries))
        if self.request.drafted:
            choice["tokens"] = _draft_marks(result.texts, result.from_draft)
        return choice

    def _end(self, result: Result, calls: Sequence[Json]) -> None:
        """Note a text that has ended; raises `KeyError` if it was cut."""
        self.results.append(result)
        reason = _REASONS[result.finish_reason]
        self.reason = "tool_calls" if calls and reason == "stop" else reason

    def _echo(self) -> str:
        if not self.request.echo:
            return ""
        prompt = self.request.prompts[self._index // self.request.n]
        return prompt if isinstance(prompt, str) else self.codec.decode(prompt)

    def first_chunks(self) -> list[Json]:
        """Return the chunks before a text: the role in a chat, or the prompt."""
        self._begin()
        if self.chat:
            return [self._chunk({"role": "assistant", "content": "", "refusal": None})]
        return [self._chunk({"content": echo})] if (echo := self._echo()) else []

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
        text, tools = self._text, self._tools
        chunks += self._text_chunks(len(text) if tools is None else tools.shown(text))
        return chunks + self._call_chunks()[0]

    def last_chunks(self, result: Result) -> list[Json]:
        """Return the last chunks: text kept or tool calls, finish reason, and usage."""
        chunks, calls, said = self._call_chunks()
        self._text, whole = said.rstrip() if calls else said, self._text
        chunks += self._text_chunks(len(self._text))
        self.whole_calls = len(self._read_calls(whole)[0])
        self._end(result, [] if self.whole_calls < len(calls) else calls)
        chunks.append(self._chunk({}, finish_reason=self.reason))
        if self.request.usage and len(self.results) == self.request.count:
            chunks.append({**chunks[-1], "choices": [], "usage": self.usage})
        return chunks

    def _call_chunks(self) -> tuple[list[Json], list[Json], str]:
        """Return chunks of what is new in calls, all calls, and the other text."""
        calls, said = self._read_calls(self._text, self._begun_calls)
        chunks = []
        for index, call in enumerate(calls):
            arguments, parts = call["function"]["arguments"], []
            if index == len(self._sent_calls):
                self._sent_calls.append(0)
                parts = [{**call, "function": {**call["function"], "arguments": ""}}]
            if unsent := arguments[self._sent_calls[index] :]:
                self._sent_calls[index] = len(arguments)
                parts.append({"function": {"arguments": unsent}})
            for part in parts:
                delta = {"tool_calls": [{"index": index, **part}]}
                chunks.append(self._chunk(delta, **self._take_fields()))
        return chunks, calls, said

    def _text_chunks(self, end: int) -> list[Json]:
        """Return the chunk of the unsent text up to `end`, or []; marks it as sent."""
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        fields = self._take_fields() if text or end == len(self._text) else {}
        return [self._chunk({"content": text}, **fields)] if text or fields else []

    def _take_fields(self) -> Json:
        fields: Json = {name: v for name, v in self._unsent_fields.items() if v}
        self._unsent_fields = {}
        if "logprobs" in fields:
            fields["logprobs"] = self._logprobs_field(fields["logprobs"])
        return fields

    def _chunk(self, delta: Json, **more: Any) -> Json:
        """Return a chunk with new content `delta`; `more` are fields of its choice."""
        choice: Json = {"index": self._index, "finish_reason": None}
        choice |= {"logprobs": None, **more}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = {"usage": None} if self.request.usage else {}
        return {**self._head, "object": kind, "choices": [choice], **usage}

    def _read_calls(self, text: str, begun: bool = False) -> tuple[list[Json], str]:
        tools = self._tools
        calls, said = ([], text) if tools is None else tools.read(text, begun)
        return [call.for_openai() for call in calls], said

    def _logprobs_field(self, entries: Sequence[tuple[Logprob, str]]) -> Json | None:
        """Return the field logprobs for tokens and their texts; None if unwanted."""
        if not entries or "logprobs" not in self.request.options:
            return None
        if self.chat:
            content = [self._token_entry(e, e.token, e.logprob) for e, _ in entries]
            for said, (entry, _) in zip(content, entries, strict=True):
                tops = [self._token_entry(entry, *top) for top in entry.top]
                said["top_logprobs"] = tops
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
        tops: dict[str, float] = {}
        for token, value in dict([*entry.top, (entry.token, entry.logprob)]).items():
            name = self._name_of(entry, token)
            # A better token may have the same name.
            tops[f"token_id:{token}" if name in tops else name] = value
        return tops

    def _token_entry(self, entry: Logprob, token: int, value: float) -> Json:
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
    pairs = zip(texts, flags, strict=True)
    return [{"text": text, "drafted": drafted} for text, drafted in pairs]


@dataclass(frozen=True)
class Dialect:
    """One API.

    read        OpenAI's body of a body, and whether it asks for a chat; it may raise
                `AttributeError`, `KeyError` or `TypeError` for fields of other types
    whole       the answer of OpenAI's answer
    events      the events of OpenAI's chunks, of which the last may be an error
    line        how an event is written in a body of `media_type`; `last` ends the body
    error       the error of OpenAI's error and the HTTP status
    begun_calls whether events have calls while they are written
    """

    read: Read
    whole: Callable[[Json, Reply], Json] = lambda answer, reply: answer
    events: Callable[[Chunks, Reply], Chunks] = lambda chunks, reply: chunks
    line: Callable[[Json], str] = lambda event: f"data: {write_event(event)}\n\n"
    error: Callable[[Json, int], Json] = lambda error, status: error
    begun_calls: bool = True
    media_type: str = "text/event-stream; charset=utf-8"
    last: str = ""

    def body(self, asked: Json) -> tuple[Json, bool]:
        """Read a body; raises `RequestError` if it is not as the API has it."""
        try:
            return self.read(asked)
        except (AttributeError, KeyError, TypeError) as error:
            missing = f"{error} is missing" if isinstance(error, KeyError) else ""
            fact = missing or "a field has another type than in this API"
            raise RequestError(f"{fact}; see its documentation") from error


CHATS = Dialect(lambda body: (body, True), last="data: [DONE]\n\n")
COMPLETIONS = Dialect(lambda body: (body, False), last="data: [DONE]\n\n")


@dataclass
class EventStream:
    """An ASGI response that sends the pieces of a job as the events of a `dialect`.

    `first` is what `job.next` returned first. At the end `done` is called with the
    status: 200, the status of an error in the stream, or 499 if the client has left.
    """

    job: Job
    reply: Reply
    dialect: Dialect
    first: Any
    done: Callable[[int], None]
    status: int = 499

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"Cache-Control": "no-store", **self.reply.request.headers}
        kind = self.dialect.media_type
        events = StreamingResponse(self._lines(), headers=headers, media_type=kind)
        try:
            await self.job.wait(receive, events.stream_response(send))
        except RequestError:
            pass  # the client has left
        except Exception:
            self.job.cancel()
            self.status = 500
            raise
        finally:
            scope[STATUS_KEY] = self.status
            self.done(self.status)

    async def _lines(self) -> AsyncIterator[str]:
        async for event in self.dialect.events(self._chunks(), self.reply):
            yield self.dialect.line(event)
        if self.dialect.last:
            yield self.dialect.last

    async def _chunks(self) -> Chunks:
        """Yield OpenAI's chunks of all texts; an error is the last chunk."""
        reply, piece = self.reply, self.first
        try:
            while True:
                for chunk in reply.first_chunks():
                    yield chunk
                while not isinstance(piece, Result):
                    for chunk in reply.piece_chunks(piece):
                        yield chunk
                    piece = await self.job.next()
                for chunk in reply.last_chunks(piece):
                    yield chunk
                if len(reply.results) == reply.request.count:
                    break
                piece = await self.job.next()
            self.status = 200
        except JetdraftError as error:
            usual = 400 if isinstance(error, OptionError) else 500
            self.status = reply.status = getattr(error, "status", usual)
            yield refusal_fields(error, self.status)
