"""Answers in the shapes of OpenAI's API, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from jetdraft.runtime.generation import Piece, Result
from jetdraft.runtime.sampling.logprobs import Logprob
from jetdraft.runtime.text.codec import TextCodec, TextStream
from jetdraft.server.asking import Ask
from jetdraft.server.tools import Tools

Json = dict[str, Any]


class Reply:
    """Puts one request's pieces and result into words; `name` is the model's.

    Reply(ask, "robot", codec).whole(result)
    """

    def __init__(self, ask: Ask, name: str, codec: TextCodec) -> None:
        self.ask, self.codec = ask, codec
        self.chat = ask.prompt is None
        kind = "chatcmpl" if self.chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self._text, self._sent = "", 0
        self._extras: dict[str, list[Any]] = {}
        self._tokens: TextStream | None = codec.stream([]) if ask.drafted else None

    def whole(self, result: Result) -> Json:
        """The answer to a request that did not ask for a stream."""
        calls = self._calls(result.text)
        choice: Json = {"index": 0, "finish_reason": _reason(result, calls)}
        if self.chat:
            message: Json = {"role": "assistant", "content": result.text}
            if calls:
                before = result.text[: self._shown(result.text)].strip()
                message |= {"content": before or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = result.text
        choice["logprobs"] = self._logprobs(result.logprobs)
        if self.ask.drafted:
            choice["tokens"] = self._drafted(result.token_ids, result.from_draft)
        kind = "chat.completion" if self.chat else "text_completion"
        usage = _usage(result)
        return {**self._head, "object": kind, "choices": [choice], "usage": usage}

    def first(self) -> list[Json]:
        """The chunks before any text."""
        if not self.chat:
            return []
        return [self._chunk({"role": "assistant", "content": ""})]

    def piece(self, piece: Piece) -> list[Json]:
        """The chunks of what a round added, none while it may become a call."""
        self._text += piece.text
        if "logprobs" in self.ask.options:
            self._extras.setdefault("logprobs", []).extend(piece.logprobs)
        if self.ask.drafted:
            flags = [i < piece.from_draft for i in range(len(piece.token_ids))]
            tokens = self._drafted(piece.token_ids, flags)
            self._extras.setdefault("tokens", []).extend(tokens)
        return self._content(self._shown(self._text))

    def last(self, result: Result) -> list[Json]:
        """The chunks after all text."""
        calls = self._calls(self._text)
        if calls:
            indexed = [{"index": i, **call} for i, call in enumerate(calls)]
            chunks = [self._chunk({"tool_calls": indexed}, **self._taken())]
        else:
            chunks = self._content(len(self._text))
        chunks.append(self._chunk({}, finish_reason=_reason(result, calls)))
        if self.ask.usage:
            chunks.append({**chunks[-1], "choices": [], "usage": _usage(result)})
        return chunks

    def _content(self, end: int) -> list[Json]:
        """What of the text up to there was not sent yet, and what is told beside it."""
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        extras = self._taken() if text or end == len(self._text) else {}
        return [self._chunk({"content": text}, **extras)] if text or extras else []

    def _taken(self) -> Json:
        """What is told of the tokens since the last time."""
        found: Json = {name: told for name, told in self._extras.items() if told}
        self._extras = {}
        if "logprobs" in found:
            found["logprobs"] = self._logprobs(found["logprobs"])
        return found

    def _shown(self, text: str) -> int:
        """How much of a text is no call of a tool."""
        tools = self.ask.tools
        return tools.shown(text) if self.chat and tools is not None else len(text)

    def _chunk(self, delta: Json, **more: Any) -> Json:
        choice: Json = {"index": 0, "finish_reason": None, "logprobs": None, **more}
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice]}

    def _calls(self, text: str) -> list[Json]:
        tools: Tools | None = self.ask.tools
        return tools.calls(text) if self.chat and tools is not None else []

    def _drafted(self, ids: Sequence[int], flags: Sequence[bool]) -> list[Json]:
        """The text that each token completed, and whether it had been drafted."""
        assert self._tokens is not None
        return [
            {"text": self._tokens.push([token]), "drafted": drafted}
            for token, drafted in zip(ids, flags, strict=True)
        ]

    def _logprobs(self, found: Sequence[Logprob] | None) -> Json | None:
        if not found or "logprobs" not in self.ask.options:
            return None
        if self.chat:
            return {"content": [self._told(each) for each in found]}
        return {
            "tokens": [self.codec.decode([each.token]) for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [
                {self.codec.decode([token]): value for token, value in each.top}
                for each in found
            ],
        }

    def _told(self, each: Logprob) -> Json:
        tops = [self._token(token, value) for token, value in each.top]
        return {**self._token(each.token, each.logprob), "top_logprobs": tops}

    def _token(self, token: int, value: float) -> Json:
        text = self.codec.decode([token])
        # A part of a character has bytes that its text does not tell.
        told = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": told}


def _reason(result: Result, calls: Sequence[Json]) -> str:
    """OpenAI knows no deadline: such a text was cut off for its length in time."""
    if calls:
        return "tool_calls"
    return "stop" if result.finish_reason == "stop" else "length"


def _usage(result: Result) -> Json:
    """Counts; OpenAI's names for what its predicted outputs save fit drafts."""
    stats, accepted = result.stats, sum(result.from_draft)
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.new_tokens,
        "total_tokens": stats.prompt_tokens + stats.new_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": stats.drafted_tokens - accepted,
        },
    }
