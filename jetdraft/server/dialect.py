"""How one API asks and answers: its form of OpenAI's bodies, answers and chunks.

A dialect only translates: every API has the same request, queue and reply.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from jetdraft.errors import JetdraftError, OptionError
from jetdraft.runtime.piece import Result
from jetdraft.server import RequestError, refusal_fields
from jetdraft.server.reply import Json, Reply
from jetdraft.server.request_queue import Job

T = TypeVar("T")
STATUS_KEY = "jetdraft.status"  # In an ASGI scope: the final status of a stream.


async def _same_chunks(
    chunks: AsyncIterator[Json], reply: Reply
) -> AsyncIterator[Json]:
    async for chunk in chunks:
        yield chunk


def data_line(event: Json) -> str:
    """A server-sent event without a name."""
    return f"data: {json.dumps(event)}\n\n"


def named_line(event: Json) -> str:
    """A server-sent event with the name in its field `type`."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


@dataclass(frozen=True)
class Dialect:
    """One API.

    read        OpenAI's body of a body, and whether it asks for a chat; it may raise
                `AttributeError`, `KeyError` or `TypeError` for fields of other types
    whole       the answer of OpenAI's answer
    events      the events of OpenAI's chunks, of which the last may be an error
    line        how an event is written in a body of `media_type`; `last` ends the body
    error       the error of OpenAI's error and the HTTP status
    """

    read: Callable[[Json], tuple[Json, bool]]
    whole: Callable[[Json, Reply], Json] = lambda answer, reply: answer
    events: Callable[[AsyncIterator[Json], Reply], AsyncIterator[Json]] = _same_chunks
    line: Callable[[Json], str] = data_line
    last: str = ""
    media_type: str = "text/event-stream; charset=utf-8"
    error: Callable[[Json, int], Json] = lambda error, status: error

    def body(self, asked: Json) -> tuple[Json, bool]:
        """Read a body; raises `RequestError` if it is not as the API has it."""
        try:
            return self.read(asked)
        except (AttributeError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise RequestError(
                f"a field is not as this API documents it ({reason}); fix it"
            ) from error


CHATS = Dialect(lambda body: (body, True), last="data: [DONE]\n\n")
COMPLETIONS = Dialect(lambda body: (body, False), last="data: [DONE]\n\n")


@dataclass
class Block:
    """A part of an answer: its `kind` is "thought", "text" or "call".

    `text` is what came so far, of a call the arguments. `name` is a call's function.
    """

    kind: str
    name: str = ""
    id: str = field(default_factory=lambda: uuid4().hex)
    text: str = ""


def grow(blocks: list[Block], chunk: Json) -> Iterator[tuple[Block, str]]:
    """Add OpenAI's chunk or answer to `blocks`.

    Yields a block that begins with "", and then the last block with each text added.
    """
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or choice.get("message") or choice
        said = delta.get("content") or delta.get("text")
        for kind, text in ("thought", delta.get("reasoning_content")), ("text", said):
            if text:
                if not blocks or blocks[-1].kind != kind:
                    yield _begin(blocks, Block(kind))
                yield _add(blocks, text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                yield _begin(blocks, Block("call", function["name"], call["id"]))
            if function.get("arguments"):
                yield _add(blocks, function["arguments"])


def _begin(blocks: list[Block], block: Block) -> tuple[Block, str]:
    blocks.append(block)
    return block, ""


def _add(blocks: list[Block], text: str) -> tuple[Block, str]:
    blocks[-1].text += text
    return blocks[-1], text


def whole_blocks(answer: Json) -> list[Block]:
    """The blocks of OpenAI's whole answer."""
    blocks: list[Block] = []
    for _ in grow(blocks, answer):
        pass
    return blocks


def function_tool(tool: Json, kind: str, parameters: str) -> Json:
    """OpenAI's tool of another API's tool of type `kind` with a field `parameters`."""
    own = tool.get("type") or kind
    if own != kind:
        raise RequestError(
            f"a tool of type {own!r} does not run here; give functions", "tools"
        )
    function = {"name": tool["name"], "parameters": tool.get(parameters) or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


class EventStream:
    """An ASGI response that sends the pieces of a job as the events of a `dialect`.

    `first` is what `job.next` returned first. At the end `done` is called with the
    status: 200, the status of an error in the stream, or 499 if the client has left.
    """

    def __init__(
        self,
        job: Job,
        reply: Reply,
        dialect: Dialect,
        first: Any,
        done: Callable[[int], None],
    ) -> None:
        self._job, self._reply, self._first, self._done = job, reply, first, done
        self._dialect, self._status = dialect, 499

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
        headers = {
            "Content-Type": self._dialect.media_type,
            "Cache-Control": "no-store",
            **self._reply.headers,
        }
        raw = [(name.lower().encode(), v.encode()) for name, v in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        async for event in self._dialect.events(self._chunks(), self._reply):
            data = self._dialect.line(event).encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        last = self._dialect.last.encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _chunks(self) -> AsyncIterator[Json]:
        """Yield OpenAI's chunks of all texts; an error is the last chunk."""
        reply, piece = self._reply, self._first
        try:
            while True:
                for chunk in reply.first_chunks():
                    yield chunk
                while not isinstance(piece, Result):
                    for chunk in reply.piece_chunks(piece):
                        yield chunk
                    piece = await self._job.next()
                for chunk in reply.last_chunks(piece):
                    yield chunk
                if len(reply.results) == reply.request.count:
                    break
                piece = await self._job.next()
            self._status = 200
        except JetdraftError as error:
            usual = 400 if isinstance(error, OptionError) else 500
            self._status = getattr(error, "status", usual)
            yield refusal_fields(error, self._status)


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
