"""A request for a generation, checked before it waits for a model."""

import json
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from jetdraft.errors import refusing
from jetdraft.parsing import JsonError, read_json
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.options import GenerateOptions, Options
from jetdraft.runtime.stream import Stream
from jetdraft.runtime.text.codec import check_characters
from jetdraft.runtime.text.template import Message, check_messages, take_images
from jetdraft.runtime.text.tools import Tools
from jetdraft.server import RequestError

Body = Mapping[str, Any]
Prompt = str | list[int]
# Fields that are options of `Model.generate`; from `top_k` on OpenAI has none.
OPTION_FIELDS = (
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "method", "num_draft_tokens"),
    *("ignore_eos", "max_seconds", "max_thinking_tokens"),
    *("json_schema", "regex", "grammar"),
)
# Other fields that are read.
READ_FIELDS = (
    *("model", "stream", "stream_options", "include_drafted", "logit_bias"),
    *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n"),
    *("prompt", "echo", "suffix", "best_of", "prediction"),
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
    *("chat_template_kwargs", "enable_thinking", "reasoning_effort", "thinking"),
)
# Fields of other programs that change nothing; a header of the answer names them.
IGNORED_FIELDS = (
    *("metadata", "store", "service_tier", "verbosity", "include"),
    *("safety_identifier", "user", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "truncation", "max_tool_calls", "context_management"),
    *("cache_control", "inference_geo", "keep_alive", "cache_prompt"),
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"),
    *("low_vram", "f16_kv", "vocab_only", "logits_all", "use_mmap", "use_mlock"),
    *("client_metadata", "reasoning.summary", "reasoning.generate_summary"),
    *("reasoning.context", "reasoning.mode", "text.verbosity"),
)
# Fields that would change the answer, with the values that do not: these are ignored.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **{"modalities": (["text"],), "audio": (), "web_search_options": ()},
    **{"functions": ([],), "function_call": ("none", "auto"), "moderation": ()},
    **{"background": (False,), "previous_response_id": (), "conversation": ()},
    **{"mcp_servers": ([],), "container": (), "images": ([],), "context": ([],)},
    **{"template": ("",), "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,)},
    **{"repeat_last_n": (-1,), "guided_json": (), "guided_regex": ()},
}
IGNORED_HEADER = "X-Jetdraft-Ignored"  # Names the ignored fields of a request.
MAX_ENTRIES = 1 << 17  # Tokens and log probabilities of an answer, held in memory.
MAX_CHOICES, MAX_PROMPTS = 8, 64  # Texts of a prompt, and prompts of a request.
# The tokens before a prefix, its suffix, and the text between them; DeepSeek's last.
FILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)
# Tokens with which these models end such a text, beside their usual end.
FILL_ENDS = ("▁<EOT>", "<|file_separator|>", "<|file_sep|>", "<|fim_pad|>")
ROLES = ("system", "developer", "user", "assistant", "tool")  # Who writes a message.
MAX_STOPS, MAX_STOP_CHARS = 16, 1000  # Each token is compared with all.
# The most characters of a constraint, and of all tools; `Matcher` limits their work.
MAX_SOURCE_CHARS = 64_000


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """What a client asks of a model, with the `options` of what computes it.

    `model` is the name of the model, "" for the only model, or the name of an adapter.
    `ignored` names fields of the body that change nothing.
    """

    options: dict[str, Any]
    model: str = ""
    ignored: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer, beside its type."""
        return {IGNORED_HEADER: ", ".join(self.ignored)} if self.ignored else {}

    @property
    def count(self) -> int:
        """The number of results."""
        return 1

    @property
    def beginning(self) -> str:
        """The text with which a later request begins if it continues this request."""
        return ""

    @property
    def max_seconds(self) -> float:
        """The most seconds that the results may take, infinite without a limit."""
        return float(self.options.get("max_seconds", inf))


@dataclass(frozen=True, kw_only=True)
class GenerationRequest(ModelRequest):
    """A request for a text, read from a JSON object.

    `prompts` are texts or token ids, empty for a chat with `messages`, whose template
    reads the variables in `template`; `n` texts are written for each. `suffix` follows
    the text, and `echo` puts the prompt before it. `options` are keywords of
    `Model.generate`. `streamed` asks for chunks, `drafted` for a mark on each token
    that was drafted, and `usage` for a last chunk with counts.
    """

    prompts: list[Prompt]
    n: int
    suffix: str
    echo: bool
    messages: list[Message]
    tools: Tools | None
    streamed: bool
    usage: bool
    drafted: bool
    template: dict[str, Any]

    @classmethod
    def of(
        cls, body: Body, chat: bool, most: int, defaults: GenerateOptions | None = None
    ) -> Self:
        """Check the body of a completion or a `chat`; raises `JetdraftError`.

        It may ask for at most `most` tokens. Its fields replace options in `defaults`,
        whose keys are keywords of `Model.generate`.
        """
        match body.get("thinking"):  # Anthropic's
            case {"type": "disabled"}:
                body = {**body, "reasoning_effort": "none"}
            case {"budget_tokens": budget}:
                body = {**body, "max_thinking_tokens": budget}
        ignored = [name for name in body if _is_ignored(name, body[name])]
        for name in body:
            if problem := _field_problem(name, body, chat):
                raise RequestError(problem, name)
        options: dict[str, Any] = {**(defaults or {}), **_get_options(body, chat, most)}
        own = (defaults or {}).get("logit_bias") or {}
        if own and "logit_bias" in body:  # tokens that are never written stay so
            options["logit_bias"] = {**options["logit_bias"], **own}
        options.setdefault("temperature", 0.0)  # as in Python and the terminal
        Options.of(**options)  # refuses bad options
        chunks = body.get("stream_options", {})
        said = check_messages(body.get("messages")) if chat else []
        wanted = cls(
            prompts=[] if chat else _read_prompts(body.get("prompt")),
            n=body.get("n", 1),
            suffix=body.get("suffix", ""),
            echo=body.get("echo", False),
            messages=[_read_message(m, f"messages[{n}]") for n, m in enumerate(said)],
            tools=_read_tools(body, options),
            options=options,
            model=body.get("model", ""),
            streamed=body.get("stream", False),
            usage=isinstance(chunks, dict) and bool(chunks.get("include_usage")),
            drafted=body.get("include_drafted", False),
            ignored=ignored,
            template=_read_template_variables(body),
        )
        per_token = 1 + (options.get("logprobs") or 0)
        if wanted.count * options["max_new_tokens"] * per_token > MAX_ENTRIES:
            fact = f"the texts have more than {MAX_ENTRIES} tokens and log "
            fact += "probabilities in all; ask for fewer at once"
            raise RequestError(fact, "n")
        return wanted

    @property
    def count(self) -> int:
        return self.n * max(1, len(self.prompts))

    @property
    def beginning(self) -> str:
        given = [self.model, *self.prompts[:1], *self.messages]
        return json.dumps(given, default=hash).rstrip('"]')

    def streams(self, model: Model) -> Iterator[Stream]:
        """Start the texts in turn: i has the seed plus i, all share `max_seconds`."""
        end = time.monotonic() + self.max_seconds
        for prompt in self.prompts or [""]:
            for place in range(self.n):
                options = dict(self.options)
                if "seed" in options:
                    options["seed"] += place
                if "max_seconds" in options:
                    options["max_seconds"] = max(end - time.monotonic(), 1e-3)
                yield self._stream(model, prompt, options)

    def _stream(self, model: Model, prompt: Prompt, options: dict[str, Any]) -> Stream:
        functions = [] if self.tools is None else self.tools.functions
        read = [prompt, self.suffix, self.messages, functions, self.template]
        check_characters(_count_characters(read), model.parts.target.contract.capacity)
        if self.suffix:
            ids, ends = _fill_ids(model, prompt, self.suffix)
            stops = options.get("stop") or []
            options["stop"] = [*([stops] if isinstance(stops, str) else stops), *ends]
            return model.stream(token_ids=ids, **options)
        if not isinstance(prompt, str):
            return model.stream(token_ids=prompt, **options)
        if self.prompts:
            return model.stream(prompt, **options)
        variables = {"tools": functions or None, **self.template}
        ids = model.chat_prompt(self.messages, **variables)
        options["images"] = take_images(self.messages)[1]
        return model.stream_reply(ids, tools=self.tools, **options)


def _fill_ids(model: Model, prefix: Prompt, suffix: str) -> tuple[list[int], list[str]]:
    """Return the ids of a prompt that ends before `suffix`, and what ends its text."""
    text = model.parts.text
    for names in FILL_TOKENS:
        first, second, third = map(text.token_id, names)
        if first is not None and second is not None and third is not None:
            before = text.encode(prefix, False) if isinstance(prefix, str) else prefix
            after = text.encode(suffix, False)
            ids = [*text.encode(""), first, *before, second, *after, third]
            return ids, [end for end in FILL_ENDS if text.token_id(end) is not None]
    fact = "suffix needs a model that fills gaps, and this vocabulary has no tokens"
    raise RequestError(f"{fact} such as <|fim_middle|>; leave it out", "suffix")


def _is_ignored(name: str, value: object) -> bool:
    """Whether a field changes nothing; raises `RequestError` for an unknown field."""
    if name in UNSUPPORTED_FIELDS:
        if value in UNSUPPORTED_FIELDS[name]:
            return True
        raise RequestError(f"{name} is not supported; leave it out", name)
    known = *OPTION_FIELDS, *READ_FIELDS
    if name not in (*known, *IGNORED_FIELDS):
        near = get_close_matches(name, () if "." in name else known, 1)
        fix = f"did you mean {near[0]}?" if near else "leave it out"
        raise RequestError(f"unknown field {name!r}; {fix}", name)
    return name in IGNORED_FIELDS


def _field_problem(name: str, body: Body, chat: bool) -> str:
    """Return what is wrong with the value of a field, in words; "" if it is right."""
    value, problem = body[name], ""
    match name:
        case "n" if type(value) is not int or not 1 <= value <= MAX_CHOICES:
            problem = f"{value!r} is out of range; this server gives 1 to {MAX_CHOICES}"
        case "best_of" if value != body.get("n", 1):
            problem = "can only be n; ask for n texts and choose"
        case "suffix" if not isinstance(value, str):
            problem = "is not a text; give a text"
        case "echo" | "suffix" if value and chat:
            problem = "is for completions; leave it out"
        case "echo" if value and "logprobs" in body:
            problem = "gives no logprobs of the prompt; leave one of them out"
        case "stream" | "include_drafted" | "parallel_tool_calls" | "logprobs" | "echo":
            if not isinstance(value, bool) and (chat or name != "logprobs"):
                problem = f"{value!r} is neither true nor false"
        case "stop":
            stops = value if isinstance(value, list) else [value]
            longest = max((len(s) for s in stops if isinstance(s, str)), default=0)
            if len(stops) > MAX_STOPS or longest > MAX_STOP_CHARS:
                problem = f"has {len(stops)} texts of up to {longest} characters; give "
                problem += f"at most {MAX_STOPS} of {MAX_STOP_CHARS}"
        case "regex" | "grammar" | "json_schema" | "response_format" | "tools":
            text = value if isinstance(value, str) else json.dumps(value)
            if len(text) > MAX_SOURCE_CHARS:
                problem = f"is longer than {MAX_SOURCE_CHARS} characters; simplify it"
    return problem and f"{name} {problem}"


def _count_characters(value: object) -> int:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    return len(value) if isinstance(value, str) else 0


def _read_template_variables(body: Body) -> dict[str, Any]:
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise _field_error("chat_template_kwargs", "an object")
    names = ("enable_thinking", "reasoning_effort")
    given = {name: body[name] for name in names if body.get(name) is not None}
    if given.get("reasoning_effort") == "none":
        given.setdefault("enable_thinking", False)
    return given | variables


def _read_tools(body: Body, options: dict[str, Any]) -> Tools | None:
    """Return the tools, or None; `json_schema` moves from `options` into the tools."""
    tools = Tools.of(
        body.get("tools", []),
        body.get("tool_choice", "auto"),
        parallel=body.get("parallel_tool_calls", True),
        schema=options.get("json_schema"),
    )
    if tools is None:
        return None
    if "regex" in options or "grammar" in options:
        raise RequestError("tools and a regex or grammar exclude each other; give one")
    if not isinstance(options.pop("json_schema", {}), dict):
        raise RequestError("beside tools json_schema must be an object", "json_schema")
    return tools


def _get_options(body: Body, chat: bool, most: int) -> dict[str, Any]:
    options = {name: body[name] for name in OPTION_FIELDS if name in body}
    wanted = body.get("max_completion_tokens", body.get("max_tokens"))
    if wanted is None:
        wanted = most if chat else min(16, most)  # OpenAI's defaults
    if type(wanted) is not int or wanted < 1:
        fact = f"max_tokens {wanted!r} is out of range; this server gives 1 to {most}"
        raise RequestError(fact, "max_tokens")
    options["max_new_tokens"] = min(wanted, most)
    if "prediction" in body:
        options["prediction"] = _read_prediction(body["prediction"])
    if "logit_bias" in body:
        refusal = _field_error("logit_bias", "an object from token ids to numbers")
        with refusing(refusal, AttributeError, TypeError, ValueError):
            biases = {int(token): bias for token, bias in body["logit_bias"].items()}
        options["logit_bias"] = biases
    if chat and body.get("logprobs", False):
        options["logprobs"] = body.get("top_logprobs", 0)
    elif not chat and "logprobs" in body:
        options["logprobs"] = body["logprobs"]
    schema = _read_schema(body.get("response_format", {"type": "text"}))
    return options if schema is None else options | {"json_schema": schema}


def _read_schema(form: object) -> dict[str, Any] | None:
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
    rule = 'give {"type": "json_schema", "json_schema": {"schema": {...}}}, or type '
    raise RequestError(f'{rule}"json_object" or "text"', "response_format")


def _read_prediction(field: object) -> str:
    match field:
        case {"type": "content", "content": content}:
            text = read_content(content, "prediction.content")
            if isinstance(text, str):
                return text
    raise _field_error("prediction", '{"type": "content", "content": "..."}')


def _read_prompts(prompt: object) -> list[Prompt]:
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts: list[Any] = prompt if several else [prompt]  # type: ignore[assignment]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"give at most {MAX_PROMPTS} prompts", "prompt")
    for each in prompts:
        is_ids = isinstance(each, list) and all(type(token) is int for token in each)
        if not is_ids and not isinstance(each, str):
            fact = "give a prompt, or a list of prompts: texts or lists of token ids"
            raise RequestError(fact, "prompt")
    return prompts


def _read_message(message: Message, at: str) -> Message:
    """Check and convert a message; `at` is its path in errors, such as messages[0]."""
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise _field_error(f"{at}.role", f"one of {', '.join(ROLES)}, not {role!r}")
    for name, other in (("function_call", "tool_calls"), ("audio", "content")):
        if message.get(name) is not None:
            place = f"{at}.{name}"
            raise RequestError(f"{place} is not supported; give {other}", place)
    for name in ("name", "refusal", "tool_call_id"):
        if not isinstance(message.get(name) or "", str):
            raise _field_error(f"{at}.{name}", "a text")
    if role == "tool" and message.get("tool_call_id") is None:
        raise _field_error(f"{at}.tool_call_id", "the id of the call that is answered")
    if content is None and role == "assistant":
        content = ""
    changed = {**message, "content": read_content(content, f"{at}.content")}
    if role == "developer":
        changed["role"] = "system"
    calls, place = message.get("tool_calls"), f"{at}.tool_calls"
    if calls is not None:
        if not isinstance(calls, list):
            raise _field_error(place, "a list of calls")
        numbered = enumerate(calls)
        changed["tool_calls"] = [_read_call(c, f"{place}[{n}]") for n, c in numbered]
    return changed


def read_content(content: object, at: str) -> str | list[Message]:
    """The text of a content, or its parts if it has images, whose bytes are read."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _field_error(at, "a text or a list of parts")
    parts = [read_part(part, f"{at}[{n}]") for n, part in enumerate(content)]
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else "".join(part["text"] for part in parts)


def read_part(part: object, at: str) -> Message:
    """Read a part of a message: a text, or an image as OpenAI or Anthropic send it."""
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "image": (bytes() | Path()) as image}:  # read already
            return {"type": "image", "image": image}
        case {"image_url": {"url": str(data)} | str(data)}:
            pass
        case {"type": "image", "source": {"type": "url", "url": str(data)}}:
            pass
        case {"type": "image", "source": {"type": "base64", "data": str(text)}}:
            data = f"data:;base64,{text}"
        case _:
            raise _field_error(at, "a text, or an image in base64")
    start, mark, encoded = data.partition(";base64,")
    if data.startswith("file://"):
        return {"type": "image", "image": Path(unquote(data.removeprefix("file://")))}
    if not start.startswith("data:") or not mark:
        rule = "an image as data:image/png;base64,...; this server fetches nothing"
        raise _field_error(at, rule)
    try:
        return {"type": "image", "image": b64decode(encoded, validate=True)}
    except ValueError as error:
        raise _field_error(at, f"an image in base64 ({error})") from error


def _read_call(call: Any, at: str) -> Any:
    """Return a tool call with parsed arguments: OpenAI sends them as JSON text."""
    match call:
        case {"function": {"name": str(), "arguments": arguments} as function} if (
            isinstance(call.get("id") or "", str)
        ):
            place = f"{at}.function.arguments"
        case _:
            function = '{"name": "...", "arguments": "{...}"}'
            rule = f'{{"id": "...", "type": "function", "function": {function}}}'
            raise _field_error(at, rule)
    try:
        if isinstance(arguments, str):
            arguments = read_json(arguments or "{}", exact=True)
    except JsonError as error:
        raise RequestError(f"{place} is not JSON ({error})", place) from error
    if not isinstance(arguments, dict):
        raise _field_error(place, "the text of a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _field_error(at: str, rule: str) -> RequestError:
    return RequestError(f"{at} must be {rule}", at)
