"""What a request's body asks for, checked before it waits for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetdraft.errors import ConstraintError, JetdraftError
from jetdraft.runtime.generation import Stream
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.options import Options
from jetdraft.runtime.text.template import Message, check_messages
from jetdraft.server.tools import Tools

Body = Mapping[str, Any]

OPTIONS = (
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "method", "num_draft_tokens"),
    *("ignore_eos", "max_seconds", "json_schema", "regex", "grammar"),
)
"""Fields that are options of `Model.generate`; from `top_k` on OpenAI has none such."""

READ = (
    *("model", "stream", "stream_options", "include_drafted", "user", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n"),
    *("prompt", "echo", "suffix", "best_of"),
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
)
IGNORED = (
    *("metadata", "store", "service_tier", "verbosity", "reasoning_effort"),
    *("safety_identifier", "prompt_cache_key"),
)
"""Fields of OpenAI's that ask for nothing a device has."""


MOST_SOURCE = 8000
"""Characters of a grammar: reading one may take the cube of that."""


class RequestError(JetdraftError):
    """A request that cannot be answered, with the HTTP `status` that says so."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Ask:
    """What to continue, how, and in which form.

    `prompt` is a text or ids, None where there are `messages`. `drafted` asks for which
    tokens had been drafted, `usage` for a last chunk with counts.

        Ask.of({"model": "b", "prompt": "def"}, chat=False, most=256)
    """

    prompt: str | list[int] | None
    messages: list[Message]
    tools: Tools | None
    options: dict[str, Any]
    streamed: bool
    usage: bool
    drafted: bool
    user: str

    @classmethod
    def of(cls, body: Body, chat: bool, most: int, marked: bool = False) -> Ask:
        """Of a JSON object; `most` new tokens at a time. Raises `JetdraftError`.

        `marked` is that of `Tools`.
        """
        unknown = [n for n in body if n not in (*OPTIONS, *READ, *IGNORED)]
        if unknown:
            raise RequestError(f"unknown field {unknown[0]!r}; leave it out")
        for name in ("n", "best_of"):
            if body.get(name, 1) != 1:
                raise RequestError(
                    f"{name} can only be 1; ask again with another seed", name
                )
        for name in ("echo", "suffix"):
            if body.get(name):
                raise RequestError(f"there is no {name} here; leave it out", name)
        options = _options(body, chat, most)
        Options(**options)  # refuses what is out of range
        tools = _tools(body, options, marked)
        stream = body.get("stream_options", {})
        return cls(
            prompt=None if chat else _prompt(body),
            messages=_messages(body) if chat else [],
            tools=tools,
            options=options,
            streamed=_flag(body, "stream"),
            usage=isinstance(stream, dict) and bool(stream.get("include_usage")),
            drafted=_flag(body, "include_drafted"),
            user=str(body.get("user", "")),
        )

    def stream(self, model: Model) -> Stream:
        """The generation that answers it."""
        if isinstance(self.prompt, str):
            return model.stream(self.prompt, **self.options)
        if self.prompt is not None:
            return model.stream(token_ids=self.prompt, **self.options)
        if self.tools is None:
            ids = model.chat_prompt(self.messages)
            return model.stream(token_ids=ids, **self.options)
        ids = model.chat_prompt(self.messages, tools=self.tools.functions)
        options = {**self.options, "grammar": self.tools.grammar()}
        try:
            return model.stream(token_ids=ids, **options)
        except ConstraintError:
            self.tools.check(model.vocabulary)  # says which, and where
            raise


def _tools(body: Body, options: dict[str, Any], marked: bool) -> Tools | None:
    """The tools, which take over what the options say of JSON."""
    found = Tools.of(
        body.get("tools", []),
        body.get("tool_choice", "auto"),
        marked=marked,
        parallel=_flag(body, "parallel_tool_calls", True),
        schema=options.get("json_schema"),
    )
    if found is None:
        return None
    if "regex" in options or "grammar" in options:
        raise RequestError("tools and a regex or grammar exclude each other; give one")
    if not isinstance(options.pop("json_schema", {}), dict):
        raise RequestError("beside tools json_schema must be an object", "json_schema")
    return found


def _flag(body: Body, name: str, usual: bool = False) -> bool:
    value = body.get(name, usual)
    if not isinstance(value, bool):
        raise RequestError(f"{name} {value!r} is neither true nor false", name)
    return value


def _options(body: Body, chat: bool, most: int) -> dict[str, Any]:
    """The keyword arguments of `Model.stream`."""
    found = {name: body[name] for name in OPTIONS if name in body}
    for name in ("regex", "grammar"):
        if len(str(found.get(name, ""))) > MOST_SOURCE:
            raise RequestError(
                f"the {name} is longer than {MOST_SOURCE} characters; make it simpler",
                name,
            )
    found.setdefault("temperature", 1.0)  # as OpenAI's default
    wanted = body.get("max_completion_tokens", body.get("max_tokens"))
    if wanted is None:
        wanted = most if chat else min(16, most)  # as OpenAI's defaults
    if isinstance(wanted, int) and wanted > most:
        raise RequestError(
            f"max_tokens {wanted} is more than this server gives; ask for at most "
            f"{most}",
            "max_tokens",
        )
    found["max_new_tokens"] = wanted
    if "logit_bias" in body:
        found["logit_bias"] = _biases(body["logit_bias"])
    if chat and _flag(body, "logprobs"):
        found["logprobs"] = body.get("top_logprobs", 0)
    elif not chat and "logprobs" in body:
        found["logprobs"] = body["logprobs"]
    schema = _schema(body.get("response_format", {"type": "text"}))
    if schema is not None:
        found["json_schema"] = schema
    return found


def _biases(given: object) -> dict[int, Any]:
    try:
        return {int(token): bias for token, bias in dict(given).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        raise RequestError(
            "logit_bias is no object from ids of tokens to numbers", "logit_bias"
        ) from error


def _schema(form: object) -> dict[str, Any] | None:
    """What a response format wants JSON to be."""
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    raise RequestError(
        'give {"type": "json_schema", "json_schema": {"schema": {...}}}, or type '
        '"json_object" or "text"',
        "response_format",
    )


def _prompt(body: Body) -> str | list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(each) is int for each in prompt):
        return prompt
    raise RequestError("give one prompt, a text or a list of token ids", "prompt")


def _messages(body: Body) -> list[Message]:
    """Messages as templates know them."""
    return [_message(each) for each in check_messages(body.get("messages"))]


def _message(message: Message) -> Message:
    made = {**message, "content": _text(message.get("content"))}
    if made["role"] == "developer":
        made["role"] = "system"
    calls = made.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestError("a message's tool_calls must be a list", "messages")
    if calls:
        made["tool_calls"] = [_call(call) for call in calls]
    return made


def _text(content: object) -> str:
    """The text of a message that may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    match content:
        case [*parts]:
            return "".join(_part(part) for part in parts)
    raise RequestError("a message's content must be text", "messages")


def _part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise RequestError("a message can only have parts of type text", "messages")


def _call(call: Any) -> Any:
    """OpenAI has arguments as JSON text, templates want what it says."""
    match call:
        case {"function": {"name": str(), "arguments": str(arguments)} as function}:
            try:
                said = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    "the arguments of a tool call are not JSON", "messages"
                ) from error
            return {**call, "function": {**function, "arguments": said}}
    return call
