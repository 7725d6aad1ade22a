"""How one API asks and answers, told by OpenAI's bodies, answers and chunks.

A dialect only translates: every API has the same request, queue and reply.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from uuid import uuid4

from jetdraft.server import RequestError
from jetdraft.server.reply import Json, Reply


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
        thought = delta.get("reasoning_content")
        for kind, text in (
            ("thought", thought),
            ("text", delta.get("content") or delta.get("text")),
        ):
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
