"""OpenAI's newer API: /v1/responses, without anything that it would keep."""

from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

from jetdraft.server import RequestError
from jetdraft.server.dialect import (
    Block,
    Dialect,
    function_tool,
    grow,
    named_line,
    whole_blocks,
)
from jetdraft.server.reply import Json, Reply

# The fields of a request that an answer repeats, with their defaults.
_REPEATED: Json = {
    **{"instructions": None, "max_output_tokens": None, "metadata": {}, "top_p": 1.0},
    **{"parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "user": None},
    **{"reasoning": {"effort": None}, "text": {"format": {"type": "text"}}},
}
_PREFIXES = {"text": "msg", "thought": "rs", "call": "fc"}  # Of ids, by kind.
# The events with the text of a block, by kind.
_TEXT_EVENTS = {"text": "output_text", "thought": "reasoning_text"}
_TEXT_EVENTS["call"] = "function_call_arguments"


def _read(asked: Json) -> tuple[Json, bool]:
    """OpenAI's body of a chat, of items and of tools without an inner object."""
    body = {name: value for name, value in asked.items() if name != "input"}
    logprobs = "message.output_text.logprobs" in body.get("include", ())
    if "prompt" in body or logprobs or body.pop("top_logprobs", 0):
        raise RequestError("prompt and logprobs are not supported; leave them out")
    if "max_output_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_output_tokens")
    messages = []
    if system := body.pop("instructions", None):
        messages.append({"role": "system", "content": system})
    items = asked["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items:
        message = _read_item(item)
        before = messages[-1] if messages else {"role": ""}
        both_speak = before.get("content") and message.get("content")
        if message["role"] == "assistant" == before["role"] and not both_speak:
            message = _join(messages.pop(), message)
        messages.append(message)
    text = body.pop("text", {})
    if form := text.get("format"):
        body["response_format"] = {"type": form["type"], "json_schema": form}
    effort = body.pop("reasoning", {}).get("effort")
    if effort is not None:
        body["reasoning_effort"] = effort
    if "tools" in body:
        body["tools"] = [
            function_tool(tool, "function", "parameters") for tool in body["tools"]
        ]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "function":
        name = {"name": choice["name"]}
        body["tool_choice"] = {"type": "function", "function": name}
    return {**body, "messages": messages}, True


def _read_item(item: Json) -> Json:
    """OpenAI's message of an item of the input, or a part of the assistant's."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item["role"], "content": item["content"]}
    if kind == "function_call":
        call = {"name": item["name"], "arguments": item["arguments"]}
        one = {"id": item["call_id"], "type": "function", "function": call}
        return {"role": "assistant", "tool_calls": [one]}
    if kind == "function_call_output":
        id, output = item["call_id"], item["output"]
        return {"role": "tool", "tool_call_id": id, "content": output}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        thought = "".join(part["text"] for part in parts)
        return {"role": "assistant", "reasoning_content": thought}
    raise RequestError(
        f"input has an item of type {kind!r}, which is not read here; leave it out",
        "input",
    )


def _join(before: Json, more: Json) -> Json:
    """One message of two parts of the assistant's turn."""
    content = before.get("content") or more.get("content")
    calls = before.get("tool_calls", []) + more.get("tool_calls", [])
    return {**before, **more, "content": content, "tool_calls": calls}


def _id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"


def _part(block: Block, text: str) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(block: Block, is_done: bool) -> Json:
    """The item of a block; empty unless it `is_done`."""
    status = "completed" if is_done else "in_progress"
    item: dict[str, Any] = {"id": _id(block), "status": status}
    if block.kind == "call":
        text, name = block.text if is_done else "", block.name
        item |= {"type": "function_call", "call_id": block.id}
        return {**item, "name": name, "arguments": text}
    item["content"] = [_part(block, block.text)] if is_done else []
    if block.kind == "thought":
        return {**item, "type": "reasoning", "summary": []}
    return {**item, "type": "message", "role": "assistant"}


def _response(reply: Reply, blocks: list[Block], is_done: bool) -> Json:
    cut = {"reason": "max_output_tokens"} if reply.reason == "length" else None
    status = "incomplete" if cut else "completed"
    return {
        **{name: reply.asked.get(name, value) for name, value in _REPEATED.items()},
        **{"id": f"resp_{reply.id}", "object": "response", "model": reply.name},
        **{"created_at": reply.created, "error": None, "incomplete_details": cut},
        **{"previous_response_id": None, "store": False, "truncation": "disabled"},
        "temperature": reply.request.options["temperature"],
        "status": status if is_done else "in_progress",
        "output": [_item(block, True) for block in blocks],
        "usage": _usage(reply) if is_done else None,
    }


def _usage(reply: Reply) -> Json:
    usage = reply.usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }


def _whole(answer: Json, reply: Reply) -> Json:
    return _response(reply, whole_blocks(answer), True)


async def _events(chunks: AsyncIterator[Json], reply: Reply) -> AsyncIterator[Json]:
    numbers, blocks = count(), list[Block]()

    def numbered(kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(numbers), **fields}

    for state in ("created", "in_progress"):
        response = _response(reply, [], False)
        yield numbered(f"response.{state}", response=response)
    async for chunk in chunks:
        if "error" in chunk:
            yield numbered("error", **chunk["error"] | {"type": "error"})
            return
        for block, text in grow(blocks, chunk):
            index = len(blocks) - 1
            events = _delta(block, index, text) if text else _begun(blocks)
            for kind, fields in events:
                yield numbered(f"response.{kind}", **fields)
    for kind, fields in _ended(blocks, len(blocks) - 1) if blocks else ():
        yield numbered(f"response.{kind}", **fields)
    response = _response(reply, blocks, True)
    yield numbered(f"response.{response['status']}", response=response)


Events = Iterator[tuple[str, Json]]


def _place(block: Block, index: int) -> Json:
    content = {} if block.kind == "call" else {"content_index": 0}
    return {"item_id": _id(block), "output_index": index, **content}


def _delta(block: Block, index: int, text: str) -> Events:
    logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
    event = f"{_TEXT_EVENTS[block.kind]}.delta"
    yield event, {**_place(block, index), "delta": text, **logprobs}


def _begun(blocks: list[Block]) -> Events:
    """The events of the last block, which begins, and of the block before it."""
    block, index = blocks[-1], len(blocks) - 1
    if index:
        yield from _ended(blocks, index - 1)
    yield "output_item.added", {"output_index": index, "item": _item(block, False)}
    if block.kind != "call":
        yield "content_part.added", {**_place(block, index), "part": _part(block, "")}


def _ended(blocks: list[Block], index: int) -> Events:
    block, event = blocks[index], f"{_TEXT_EVENTS[blocks[index].kind]}.done"
    place = _place(block, index)
    if block.kind == "call":
        yield event, {**place, "name": block.name, "arguments": block.text}
    else:
        logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
        yield event, {**place, "text": block.text, **logprobs}
        yield "content_part.done", {**place, "part": _part(block, block.text)}
    yield "output_item.done", {"output_index": index, "item": _item(block, True)}


RESPONSES = Dialect(_read, _whole, _events, named_line)
