"""APIs whose answers are blocks: Anthropic's /v1/messages, OpenAI's /v1/responses."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from jetdraft.server import RequestError
from jetdraft.server.generation_request import read_content, read_part
from jetdraft.server.reply import Chunks, Dialect, Json, Read, Reply, write_event

Events = Iterator[tuple[str, Json]]
Steps = AsyncIterator[tuple[str, int, Any]]


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
    """Add a chunk or an answer to `blocks`; yields a block with "", then its texts."""
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or choice.get("message") or choice
        said = delta.get("content") or delta.get("text")
        thought = delta.get("reasoning_content")
        parts = [(Block("thought"), thought, False), (Block("text"), said, False)]
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            block = Block("call", function.get("name", ""), call.get("id", ""))
            parts.append((block, function.get("arguments"), "id" in call))
        for block, text, begins in parts:
            if begins or (text and (not blocks or blocks[-1].kind != block.kind)):
                blocks.append(block)
                yield block, ""
            if text:
                blocks[-1].text += text
                yield blocks[-1], text


def block_dialect(
    read: Read, write: Callable[[Reply, list[Block], bool], Json], *more: Any
) -> Dialect:
    """A `Dialect` of further fields, whose whole answers `write` makes of blocks."""

    def whole(answer: Json, reply: Reply) -> Json:
        blocks = list[Block]()
        list(grow(blocks, answer))
        return write(reply, blocks, True)

    return Dialect(read, whole, *more)


async def _steps(chunks: Chunks, blocks: list[Block]) -> Steps:
    """Yield "start", "delta", "stop" or "error", a place, and the text or the chunk."""
    async for chunk in chunks:
        if "error" in chunk:
            yield "error", 0, chunk
            return
        for _, text in grow(blocks, chunk):
            index = len(blocks) - 1
            if not text and index:
                yield "stop", index - 1, ""
            yield "delta" if text else "start", index, text
    if blocks:
        yield "stop", len(blocks) - 1, ""


def _take(body: Json, outer: str, *read: str) -> list[Any]:
    """Take fields of an object out of a body, whose others become OUTER.NAME in it."""
    if not isinstance(given := body.pop(outer, {}), dict):
        raise RequestError(f"{outer} must be an object", outer)
    fields = {name: value for name, value in given.items() if value is not None}
    taken = [fields.pop(name, None) for name in read]
    body |= {f"{outer}.{name}": value for name, value in fields.items()}
    return taken


def _translate(body: Json, form: Json | None, effort: Any, *tool: str) -> None:
    """Write a body as OpenAI does; `tool` is as `_read_tool` takes it."""
    if form:
        body["response_format"] = {"type": form["type"], "json_schema": form}
    if effort is not None:
        body["reasoning_effort"] = effort
    body["tools"] = [_read_tool(each, *tool) for each in body.get("tools", ())]


def _read_tool(tool: Json, kind: str, parameters: str) -> Json:
    own = tool.get("type") or kind
    if own != kind:
        fact = f"a tool of type {own!r} does not run here; give functions"
        raise RequestError(fact, "tools")
    function = {"name": tool["name"], "parameters": tool.get(parameters) or {}}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _named(event: Json) -> str:
    return f"event: {event['type']}\ndata: {write_event(event)}\n\n"


# OpenAI's choices of tools by Anthropic's; reasons; kinds of errors by HTTP status.
_CHOICES = {"any": "required", "auto": "auto", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {413: "request_too_large", 503: "overloaded_error"}
# The field of a block, and of its deltas with their type, by kind.
_FIELDS = {
    "text": ("text", "text", "text_delta"),
    "thought": ("thinking", "thinking", "thinking_delta"),
    "call": ("input", "partial_json", "input_json_delta"),
}


def _read_messages(asked: Json) -> tuple[Json, bool]:
    body = dict(asked)
    if "stop_sequences" in body:
        body["stop"] = body.pop("stop_sequences")
    messages = list[Json]()
    if system := body.pop("system", None):
        messages.append({"role": "system", "content": read_content(system, "system")})
    for place, message in enumerate(asked["messages"]):
        for turn in _turns(message, f"messages[{place}].content"):
            if messages and turn["role"] == "user" == messages[-1]["role"]:
                line_break = {"type": "text", "text": "\n"}
                messages[-1]["content"] += [line_break, *turn["content"]]
            else:
                messages.append(turn)
    if messages and messages[-1]["role"] == "assistant":
        fact = "messages end with the assistant's, and it would not be continued"
        raise RequestError(f"{fact}; end with the user's", "messages")
    if choice := body.get("tool_choice"):
        name = {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice["type"]
        body["tool_choice"] = name if kind == "tool" else _CHOICES.get(kind, kind)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    form, effort = _take(body, "output_config", "format", "effort")
    form = form or body.pop("output_format", None)
    _translate(body, form, effort, "custom", "input_schema")
    return {**body, "messages": messages}, True


def _turns(message: Json, at: str) -> Iterator[Json]:
    """OpenAI's messages of one of Anthropic's: results of tools, then all else."""
    role, blocks = message["role"], message["content"]
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    rest: list[Json] = []
    turn: dict[str, Any] = {"role": role, "content": rest}
    for place, block in enumerate(blocks):
        kind = block["type"]
        if kind == "tool_result":
            id, text = block["tool_use_id"], block.get("content") or ""
            text = read_content(text, f"{at}[{place}].content")
            yield {"role": "tool", "tool_call_id": id, "content": text}
        elif kind == "tool_use":
            call = {"name": block["name"], "arguments": block["input"]}
            one = {"id": block["id"], "type": "function", "function": call}
            turn.setdefault("tool_calls", []).append(one)
        elif kind == "thinking":
            turn["reasoning_content"] = block["thinking"]
        elif kind != "redacted_thinking":
            rest.append(read_part(block, f"{at}[{place}]"))
    if rest or role == "assistant":
        yield turn


def _content(block: Block) -> Json:
    if block.kind == "call":
        given = json.loads(block.text or "{}")
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}
    name = _FIELDS[block.kind][0]
    signature = {"signature": ""} if block.kind == "thought" else {}
    return {"type": name, name: block.text, **signature}


def _message(reply: Reply, blocks: list[Block], is_done: bool) -> Json:
    none = {"input_tokens": 0, "output_tokens": 0}
    return {
        **{"id": f"msg_{reply.id}", "type": "message", "role": "assistant"},
        **{"model": reply.name, "content": [_content(block) for block in blocks]},
        **(_end(reply) if is_done else {"stop_reason": None, "stop_sequence": None}),
        "usage": _message_usage(reply) if is_done else none,
    }


def _end(reply: Reply) -> Json:
    stop = reply.stop_text if reply.reason == "stop" else None
    reason = "stop_sequence" if stop else _REASONS[reply.reason]
    return {"stop_reason": reason, "stop_sequence": stop}


def _message_usage(reply: Reply) -> Json:
    usage = reply.usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        **{"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0},
    }


async def _message_events(chunks: Chunks, reply: Reply) -> Chunks:
    yield {"type": "message_start", "message": _message(reply, [], False)}
    blocks = list[Block]()
    async for step, index, text in _steps(chunks, blocks):
        if step == "error":
            yield _error(text, reply.status)
            return
        event, block = {"type": f"content_block_{step}", "index": index}, blocks[index]
        if step == "start":
            event["content_block"] = _content(block)
        elif step == "delta":
            _, name, kind = _FIELDS[block.kind]
            event["delta"] = {"type": kind, name: text}
        yield event
    usage = _message_usage(reply)
    yield {"type": "message_delta", "delta": _end(reply), "usage": usage}
    yield {"type": "message_stop"}


def _error(error: Json, status: int) -> Json:
    fields = error["error"]
    kind = "api_error" if fields["type"] == "server_error" else fields["type"]
    own = {"type": _ERRORS.get(status, kind), "message": fields["message"]}
    return {"type": "error", "error": own, "request_id": None}


MESSAGES = block_dialect(_read_messages, _message, _message_events, _named, _error)

_REPEATED: Json = {
    **{"instructions": None, "max_output_tokens": None, "metadata": {}, "top_p": 1.0},
    **{"parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "user": None},
    **{"reasoning": {"effort": None}, "text": {"format": {"type": "text"}}},
}
# By kind of block: the beginning of ids, and of the names of events with its text.
_KINDS = {
    "text": ("msg", "output_text"),
    "thought": ("rs", "reasoning_text"),
    "call": ("fc", "function_call_arguments"),
}


def _read_input(asked: Json) -> tuple[Json, bool]:
    body = {name: value for name, value in asked.items() if name != "input"}
    if "message.output_text.logprobs" in body.get("include", ()):
        raise RequestError("include can name no logprobs; leave them out", "include")
    if "prompt" in body:
        raise RequestError("prompt is not supported; leave it out", "prompt")
    if "max_output_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_output_tokens")
    messages = []
    if system := body.pop("instructions", None):
        system = read_content(system, "instructions")
        messages.append({"role": "system", "content": system})
    items = asked["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for place, item in enumerate(items):
        message = _read_item(item, f"input[{place}]")
        before = messages[-1] if messages else {"role": ""}
        both_speak = before.get("content") and message.get("content")
        if message["role"] == "assistant" == before["role"] and not both_speak:
            content = before.get("content") or message.get("content")
            calls = before.get("tool_calls", []) + message.get("tool_calls", [])
            # Two parts of the assistant's turn are one message.
            both = {"content": content, "tool_calls": calls}
            message = messages.pop() | message | both
        messages.append(message)
    [form], [effort] = _take(body, "text", "format"), _take(body, "reasoning", "effort")
    _translate(body, form, effort, "function", "parameters")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "function":
        body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    return {**body, "messages": messages}, True


def _read_item(item: Json, at: str) -> Json:
    """OpenAI's message of an item of the input, or a part of the assistant's."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item["content"] and read_content(item["content"], f"{at}.content")
        return {"role": item["role"], "content": content}
    if kind == "function_call":
        call = {"name": item["name"], "arguments": item["arguments"]}
        one = {"id": item["call_id"], "type": "function", "function": call}
        return {"role": "assistant", "tool_calls": [one]}
    if kind == "function_call_output":
        id, output = item["call_id"], read_content(item["output"], f"{at}.output")
        return {"role": "tool", "tool_call_id": id, "content": output}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        thought = "".join(part["text"] for part in parts)
        return {"role": "assistant", "reasoning_content": thought}
    fact = f"input has an item of type {kind!r}, which is not read here; leave it out"
    raise RequestError(fact, "input")


def _part(block: Block) -> Json:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    own: Json = {"annotations": [], "logprobs": []}
    return {"type": "output_text", "text": block.text, **own}


def _broken(reply: Reply, blocks: list[Block]) -> list[Block]:
    """The calls that broke off, which an answer without a stream has as text."""
    return [block for block in blocks if block.kind == "call"][reply.whole_calls :]


def _item(block: Block, is_done: bool, is_broken: bool) -> Json:
    """The item of a block; empty unless it `is_done`."""
    ended = "incomplete" if is_broken else "completed"
    status = ended if is_done else "in_progress"
    own = f"{_KINDS[block.kind][0]}_{block.id}"
    item: dict[str, Any] = {"id": own, "status": status}
    if block.kind == "call":
        item |= {"type": "function_call", "call_id": block.id, "name": block.name}
        return {**item, "arguments": block.text if is_done else ""}
    item["content"] = [_part(block)] if is_done else []
    if block.kind == "thought":
        return {**item, "type": "reasoning", "summary": []}
    return {**item, "type": "message", "role": "assistant"}


def _response(reply: Reply, blocks: list[Block], is_done: bool) -> Json:
    cut = {"reason": "max_output_tokens"} if reply.reason == "length" else None
    status, usage = "incomplete" if cut else "completed", reply.usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    broken = _broken(reply, blocks)
    return {
        **{name: reply.asked.get(name, value) for name, value in _REPEATED.items()},
        **{"id": f"resp_{reply.id}", "object": "response", "model": reply.name},
        **{"created_at": reply.created, "error": None, "incomplete_details": cut},
        **{"previous_response_id": None, "store": False, "truncation": "disabled"},
        "temperature": reply.request.options["temperature"],
        "status": status if is_done else "in_progress",
        "output": [_item(block, True, block in broken) for block in blocks],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage["total_tokens"],
        }
        if is_done
        else None,
    }


async def _response_events(chunks: Chunks, reply: Reply) -> Chunks:
    numbers, blocks, stopped = count(), list[Block](), list[int]()

    def numbered(kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(numbers), **fields}

    for state in ("created", "in_progress"):
        yield numbered(f"response.{state}", response=_response(reply, [], False))
    async for step, index, text in _steps(chunks, blocks):
        if step == "error":
            yield numbered("error", **text["error"] | {"type": "error"})
            return
        if step == "stop":
            stopped.append(index)
            if blocks[index].kind == "call" and not reply.reason:
                continue  # It may be part of a list that breaks off.
        places, stopped = (stopped, []) if step == "stop" else ([index], stopped)
        for place in places:
            block = blocks[place]
            is_broken = block in _broken(reply, blocks)
            for kind, fields in _block_events(step, block, place, text, is_broken):
                yield numbered(f"response.{kind}", **fields)
    response = _response(reply, blocks, True)
    yield numbered(f"response.{response['status']}", response=response)


def _block_events(
    step: str, block: Block, index: int, text: str, is_broken: bool
) -> Events:
    """The events, without "response." and a number, of a step of `_steps`."""
    (beginning, event), is_call = _KINDS[block.kind], block.kind == "call"
    place = {"item_id": f"{beginning}_{block.id}", "output_index": index}
    if not is_call:
        place["content_index"] = 0
    logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
    if step == "delta":
        yield f"{event}.delta", {**place, "delta": text, **logprobs}
        return
    item = {"output_index": index, "item": _item(block, step == "stop", is_broken)}
    if step == "start":
        yield "output_item.added", item
    elif is_call:
        yield f"{event}.done", {**place, "name": block.name, "arguments": block.text}
    else:
        yield f"{event}.done", {**place, "text": block.text, **logprobs}
    if not is_call:
        ending = "added" if step == "start" else "done"
        yield f"content_part.{ending}", {**place, "part": _part(block)}
    if step == "stop":
        yield "output_item.done", item


RESPONSES = block_dialect(_read_input, _response, _response_events, _named)
