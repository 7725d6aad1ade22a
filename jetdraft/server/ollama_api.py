"""Ollama's API: /api/chat and /api/generate, and what it tells of a model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from jetdraft.recipe import Recipe
from jetdraft.runtime.model import Model
from jetdraft.server import RequestError
from jetdraft.server.block_apis import Block, block_dialect, grow
from jetdraft.server.generation_request import read_part
from jetdraft.server.reply import Chunks, Json, Reply, write_event

# OpenAI's fields by Ollama's.
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_NANOSECONDS = 1e9  # In a second.
_TEXTS = ("prompt", "suffix", "messages")  # What a text continues.


def _read_options(asked: Json) -> Json:
    """OpenAI's body without messages and prompt; what is empty is left out."""
    fields = {**asked, **asked.get("options", {})}
    body = {
        _RENAMED.get(name, name): value
        for name, value in fields.items()
        if value not in ("", [], None) and name not in ("options", "format", "think")
    }
    if body.get("max_tokens", -1) < 0:  # as many as there may be
        body["max_tokens"] = 2**31
    body["stream"] = asked.get("stream", True)
    body["model"] = asked["model"].removesuffix(":latest")
    if form := asked.get("format"):
        schema = {"type": "json_schema", "json_schema": {"schema": form}}
        body["response_format"] = {"type": "json_object"} if form == "json" else schema
    think = asked.get("think")
    if isinstance(think, bool):
        think = "medium" if think else "none"
    return body if think is None else {**body, "reasoning_effort": think}


def _read_chat(asked: Json) -> tuple[Json, bool]:
    # Waiting are the ids of calls without a result, which Ollama has not.
    messages, waiting = list[Json](), list[str]()
    for place, message in enumerate(asked["messages"]):
        fields: dict[str, Any] = {k: v for k, v in message.items() if v != []}
        if images := fields.pop("images", None):
            at = f"messages[{place}].images"
            fields["content"] = _with_images(fields["content"], images, at)
        if "tool_calls" in fields:
            numbered = enumerate(fields["tool_calls"])
            calls = [{"id": f"call_{i}", **call} for i, call in numbered]
            fields["tool_calls"], waiting = calls, [call["id"] for call in calls]
        if fields["role"] == "tool":
            fields.setdefault("tool_call_id", waiting.pop(0) if waiting else "call_0")
            fields.setdefault("name", fields.pop("tool_name", None))
        messages.append(fields)
    return {**_read_options(asked), "messages": messages}, True


def _read_generate(asked: Json) -> tuple[Json, bool]:
    """A message of the user, or with `raw` or a `suffix` the text itself."""
    body = _read_options(asked)
    prompt, system = body.pop("prompt", ""), body.pop("system", None)
    if not isinstance(prompt, str):
        raise RequestError("prompt must be a text", "prompt")
    if body.pop("raw", False) or "suffix" in body:
        return {**body, "prompt": prompt}, False
    first = [] if system is None else [{"role": "system", "content": system}]
    if images := body.pop("images", None):
        prompt = _with_images(prompt, images, "images")
    return {**body, "messages": [*first, {"role": "user", "content": prompt}]}, True


def _head(name: str, done: bool) -> Json:
    return {"model": name, "created_at": datetime.now(UTC).isoformat(), "done": done}


def loaded(name: str, asked: Json) -> Json:
    """The answer to a request without a text, which loads a model; {} to others."""
    more = "model stream options keep_alive system template format raw images context"
    if asked.keys() - {*_TEXTS, *more.split()} or any(map(asked.get, _TEXTS)):
        return {}
    message = {"message": {"role": "assistant", "content": ""}}
    said = message if "messages" in asked else {"response": ""}
    return {**_head(name, True), **said, "done_reason": "load"}


def _with_images(text: str, images: Sequence[str], at: str) -> list[Json]:
    urls = enumerate(x if "://" in x else f"data:;base64,{x}" for x in images)
    parts = [read_part({"image_url": url}, f"{at}[{place}]") for place, url in urls]
    return [*parts, {"type": "text", "text": text}]


def _part(reply: Reply, blocks: list[Block], done: bool) -> Json:
    """An object with what blocks add; the last of an answer has its figures."""
    texts, calls = {"text": "", "thought": ""}, list[Json]()
    for block in blocks:
        if block.kind == "call":
            call = {"name": block.name, "arguments": json.loads(block.text or "{}")}
            calls.append({"function": call})
        else:
            texts[block.kind] += block.text
    fields = _head(reply.name, done)
    thinking = {"thinking": texts["thought"]} if texts["thought"] else {}
    if "messages" in reply.asked:
        message = {"role": "assistant", "content": texts["text"], **thinking}
        fields["message"] = {**message, **({"tool_calls": calls} if calls else {})}
    else:
        fields |= {"response": texts["text"], **thinking}
    if not done:
        return fields
    usage, stats = reply.usage, reply.results[-1].stats
    first = round(_NANOSECONDS * stats.time_to_first_token)
    rest = round(_NANOSECONDS * stats.decode_seconds)
    prompt, new = usage["prompt_tokens"], usage["completion_tokens"]
    return {
        **fields,
        "done_reason": "length" if reply.reason == "length" else "stop",
        **{"total_duration": first + rest, "load_duration": 0},
        **{"prompt_eval_count": prompt, "prompt_eval_duration": first},
        **{"eval_count": new, "eval_duration": rest},
    }


async def _events(chunks: Chunks, reply: Reply) -> Chunks:
    blocks: list[Block] = []
    async for chunk in chunks:
        if "error" in chunk:
            yield _error(chunk, 0)
            return
        for block, text in grow(blocks, chunk):
            if text and block.kind != "call":  # a call comes whole
                yield _part(reply, [Block(block.kind, text=text)], False)
    if calls := [block for block in blocks if block.kind == "call"]:
        yield _part(reply, calls, False)
    yield _part(reply, [], True)


def _error(error: Json, status: int) -> Json:
    return {"error": error["error"]["message"]}


CHAT, GENERATE = (
    replace(
        block_dialect(read, _part, _events, lambda e: write_event(e) + "\n", _error),
        begun_calls=False,
        media_type="application/x-ndjson",
    )
    for read in (_read_chat, _read_generate)
)


def model_fields(name: str, model: Model) -> Json:
    """The model as Ollama lists it and shows it."""
    bundle, target = model.bundle, model.bundle.target
    template = model.template.source if bundle.chat_template else ""
    seconds = bundle.path.stat().st_mtime
    return {
        **{"name": name, "model": name, "digest": bundle.sha256},
        "modified_at": datetime.fromtimestamp(seconds, UTC).isoformat(),
        "size": sum(file["bytes"] for file in bundle.files.values()),
        "details": {
            **{"format": "jetdraft", "family": "jetdraft", "families": ["jetdraft"]},
            "parameter_size": f"{target.parameters / 1e6:.0f}M",
            "quantization_level": Recipe.from_json(target.quantization).name,
        },
        "template": template,
        "model_info": {
            "general.architecture": "jetdraft",
            "general.parameter_count": target.parameters,
            "jetdraft.context_length": target.contract.capacity,
        },
        "capabilities": ["completion", *(["tools"] if template else [])],
    }
