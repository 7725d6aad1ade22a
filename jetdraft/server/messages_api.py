"""Anthropic's API: /v1/messages."""

import json
from collections.abc import AsyncIterator, Iterator
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

# OpenAI's names by Anthropic's, of fields and of choices of tools; and reasons.
_RENAMED = {"stop_sequences": "stop"}
_CHOICES = {"any": "required", "auto": "auto", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {413: "request_too_large", 503: "overloaded_error"}
# The field of a block, and of its deltas with their type, by kind.
_FIELDS = {
    "text": ("text", "text", "text_delta"),
    "thought": ("thinking", "thinking", "thinking_delta"),
    "call": ("input", "partial_json", "input_json_delta"),
}


def _read(asked: Json) -> tuple[Json, bool]:
    """OpenAI's body: of the system's text, of blocks, and of tools."""
    body = {_RENAMED.get(name, name): value for name, value in asked.items()}
    system = body.pop("system", None)
    messages = [{"role": "system", "content": system}] if system else []
    for message in asked["messages"]:
        for turn in _turns(message):
            if messages and turn["role"] == "user" == messages[-1]["role"]:
                line_break = {"type": "text", "text": "\n"}
                messages[-1]["content"] += [line_break, *turn["content"]]
            else:
                messages.append(turn)
    if messages and messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages end with the assistant's, and it would not be continued; end "
            "with the user's",
            "messages",
        )
    body |= {"messages": messages}
    if "tools" in body:
        body["tools"] = [
            function_tool(tool, "custom", "input_schema") for tool in body["tools"]
        ]
    if choice := body.get("tool_choice"):
        name = {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice["type"]
        body["tool_choice"] = name if kind == "tool" else _CHOICES.get(kind, kind)
        body["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    output = body.pop("output_config", {})
    if form := output.get("format") or body.pop("output_format", None):
        body["response_format"] = {"type": form["type"], "json_schema": form}
    if "effort" in output:
        body["reasoning_effort"] = output["effort"]
    match body.get("thinking"):
        case {"type": "disabled"}:
            body["reasoning_effort"] = "none"
        case {"budget_tokens": budget}:
            body["max_thinking_tokens"] = budget
    return body, True


def _turns(message: Json) -> Iterator[Json]:
    """OpenAI's messages of one of Anthropic's: results of tools, then all else."""
    role, content = message["role"], message["content"]
    blocks = (
        [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    rest: list[Json] = []
    turn: dict[str, Any] = {"role": role, "content": rest}
    for block in blocks:
        kind = block["type"]
        if kind == "tool_result":
            text = block.get("content") or ""
            yield {
                "role": "tool",
                "tool_call_id": block["tool_use_id"],
                "content": text,
            }
        elif kind == "tool_use":
            call = {"name": block["name"], "arguments": block["input"]}
            one = {"id": block["id"], "type": "function", "function": call}
            turn.setdefault("tool_calls", []).append(one)
        elif kind == "thinking":
            turn["reasoning_content"] = block["thinking"]
        elif kind != "redacted_thinking":
            rest.append({k: v for k, v in block.items() if k != "cache_control"})
    if rest or role == "assistant":
        yield turn


def _block(block: Block, text: str) -> Json:
    """A block of an answer that has the text so far."""
    name = _FIELDS[block.kind][0]
    if block.kind == "call":
        value = json.loads(text or "{}")
        return {"type": "tool_use", "id": block.id, "name": block.name, name: value}
    signature = {"signature": ""} if block.kind == "thought" else {}
    return {"type": name, name: text, **signature}


def _message(reply: Reply, blocks: list[Block], end: Json, usage: Json) -> Json:
    content = [_block(block, block.text) for block in blocks]
    head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
    return {**head, "model": reply.name, "content": content, **end, "usage": usage}


def _end(reply: Reply) -> Json:
    """Why the answer ended."""
    stop = reply.stop_text if reply.reason == "stop" else None
    reason = "stop_sequence" if stop else _REASONS[reply.reason]
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(reply: Reply) -> Json:
    usage = reply.usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _whole(answer: Json, reply: Reply) -> Json:
    return _message(reply, whole_blocks(answer), _end(reply), _usage(reply))


async def _events(chunks: AsyncIterator[Json], reply: Reply) -> AsyncIterator[Json]:
    open_, none = {"stop_reason": None, "stop_sequence": None}, {"output_tokens": 0}
    start = _message(reply, [], open_, {"input_tokens": 0, **none})
    yield {"type": "message_start", "message": start}
    blocks: list[Block] = []
    async for chunk in chunks:
        if "error" in chunk:
            yield _error(chunk, 0)
            return
        for block, text in grow(blocks, chunk):
            index = len(blocks) - 1
            if text:
                _, name, kind = _FIELDS[block.kind]
                delta = {"type": kind, name: text}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
                continue
            if index:
                yield {"type": "content_block_stop", "index": index - 1}
            begun = {"type": "content_block_start", "content_block": _block(block, "")}
            yield {**begun, "index": index}
    if blocks:
        yield {"type": "content_block_stop", "index": len(blocks) - 1}
    yield {"type": "message_delta", "delta": _end(reply), "usage": _usage(reply)}
    yield {"type": "message_stop"}


def _error(error: Json, status: int) -> Json:
    fields = error["error"]
    kind = "api_error" if fields["type"] == "server_error" else fields["type"]
    own = {"type": _ERRORS.get(status, kind), "message": fields["message"]}
    return {"type": "error", "error": own, "request_id": None}


MESSAGES = Dialect(_read, _whole, _events, named_line, error=_error)
