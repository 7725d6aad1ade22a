"""Tools, functions that a model may call: their grammar, and the calls in a text.

A call is {"name": ..., "arguments": {...}}. It stands between <tool_call> and
</tool_call> if the chat template says so, for example in Hermes and Qwen.
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jetdraft.errors import OptionError
from jetdraft.parsing import read_json
from jetdraft.runtime.text.constraint import (
    COMPILE_SECONDS,
    Constraint,
    Matcher,
    check_exact_numbers,
)
from jetdraft.runtime.text.stops import overlap
from jetdraft.runtime.text.worker_main import SPACING
from jetdraft.runtime.text.worker_process import Vocabulary

Schema = dict[str, Any]  # A JSON schema.
BEGIN_TAG, END_TAG = "<tool_call>", "</tool_call>"  # Where a template has them.
# The rule of a text without a call, for marked calls and for unmarked calls.
_TAGGED_RULES = f"""
before[suffix="{BEGIN_TAG}"]: /(.|\\n)*/
begin: {{}}
GAP: /\\n?/
call: GAP one GAP {{}}
"""
_TEXT_RULES = {
    True: f"answer: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{BEGIN_TAG}(.|\\n)*/",
    False: "answer: TEXT |\nTEXT: /[^{](.|\\n)*/",
}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the function's `name` and its `arguments`.

    `arguments` is JSON of the function's schema. The `id` is random, in the form that
    all known chat templates take.

        [call] = model.chat(messages, tools=tools).calls
        call.name, call.arguments    # "read_sensor", {"sensor": "battery"}
    """

    name: str
    arguments: Any
    id: str = field(default_factory=lambda: uuid4().hex[:9])

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def for_openai(self) -> dict[str, Any]:
        """The call as OpenAI sends it, whose arguments are a JSON text."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call, for `Conversation`, `Model.chat` and the server.

    `functions` are in OpenAI's form; `choice` is "auto", "required" (it must call) or
    the name of the function that it must call, once. With `parallel` a text may have
    several calls, if the chat template marks calls. `Model` sets `tags`, the marks in
    Lark's notation. `schema` is the JSON schema of an answer without a call. Raises
    `OptionError`.

        tools = Tools([{"type": "function", "function": {"name": "stop"}}])
        model.chat(messages, tools=tools).calls
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    tags: tuple[str, ...] = ()
    parallel: bool = True
    schema: Schema | None = None

    def __post_init__(self) -> None:
        try:
            functions, schema = read_json(json.dumps([self.functions, self.schema]))
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"the tools are not JSON ({error}); give dicts, lists, texts and "
                "numbers",
                "tools",
            ) from error
        if not isinstance(functions, list) or not all(map(_is_function, functions)):
            raise OptionError(
                'give tools as [{"type": "function", "function": {"name": ...}}]',
                "tools",
            )
        check_exact_numbers([functions, schema], "tools")
        if not functions:
            raise OptionError(f"tool_choice {self.choice!r} needs tools; give some")
        if self.choice not in ("auto", "required", *self.names):
            others = f"none of {', '.join(self.names)}"
            raise OptionError(f"tool_choice {self.choice!r} is {others}")

    @classmethod
    def of(cls, functions: object, choice: object, **more: Any) -> "Tools | None":
        """Read `tools` and `tool_choice` of a request; None without tools to call."""
        match choice:
            case {"type": "function", "function": {"name": str(name)}}:
                choice = name
            case str():
                pass
            case _:
                raise OptionError(
                    'tool_choice must be "auto", "none", "required" or a function'
                )
        is_unused = choice in ("auto", "none") and functions == []
        if is_unused or (choice == "none" and cls(functions)):  # type: ignore[arg-type]
            return None
        return cls(functions, choice, **more)  # type: ignore[arg-type]

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [tool["function"]["name"] for tool in self.functions]

    def grammar(self) -> str:
        """The grammar of an answer, in Lark's notation."""
        before = ""
        if self.tags:
            # A text may lead to a tag in any spelling, and then a call must follow.
            is_free = self.choice == "auto" and self.schema is None
            before = "before" if is_free else "begin"
        is_several = self.tags and self.parallel and self.choice not in self.names
        calls = "call (GAP begin call)*" if is_several else "call"
        answer = _TEXT_RULES[bool(self.tags)]
        if self.schema is not None:
            answer = f"answer: {_json_rule(self.schema)}"
        rules = _TAGGED_RULES.format(*self.tags) if self.tags else "call: one"
        # A document for each: an id in one may be another's too.
        functions = [tool["function"] for tool in self.functions]
        if self.choice not in ("auto", "required"):
            functions = [each for each in functions if each["name"] == self.choice]
        ones = {f"one{n}": _call_schema(each) for n, each in enumerate(functions)}
        one = f"one: {' | '.join(ones)}"
        documents = (f"{name}: {_json_rule(schema)}" for name, schema in ones.items())
        start = f"start: {'answer | ' * (self.choice == 'auto')}{before} {calls}"
        return "\n".join([start, answer, rules, one, *documents])

    def check(self, vocabulary: Vocabulary) -> None:
        """Compile each schema; raises `OptionError` that names a refused function."""
        end = time.monotonic() + COMPILE_SECONDS

        def is_late() -> bool:
            return time.monotonic() > end

        for tool in self.functions:
            schema = json.dumps(_call_schema(tool["function"]))
            try:
                constraint = Constraint("JSON schema", schema)
                Matcher(vocabulary, constraint, 0, is_late).prepare()
            except OptionError as error:
                name = tool["function"]["name"]
                raise OptionError(f"tool {name!r}: {error}", "constraint") from error

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in a text, up to the first broken call; [] if a name is unknown."""
        calls, at = list[ToolCall](), self._find_call(text, 0)
        decode = json.JSONDecoder().raw_decode
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            while at is not None:
                call, end = decode(text, at)
                # Infinite numbers and lone surrogates are no JSON.
                json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
                if call["name"] not in self.names:
                    return []
                calls.append(ToolCall(call["name"], call["arguments"]))
                at = self._find_call(text, end)
        return calls

    def _find_call(self, text: str, start: int) -> int | None:
        """The start of the next call's JSON, from `start` on; None without a call."""
        pattern = f"{BEGIN_TAG}\\s*" if self.tags else r"\A(?=\{)"
        match = re.compile(pattern).search(text, start)
        return match.end() if match else None

    def shown(self, text: str) -> int:
        """How many characters of a text cannot become a call, whatever follows."""
        if not self.tags:
            return 0 if text.startswith("{") else len(text)
        at = text.find(BEGIN_TAG)
        return at if at >= 0 else len(text) - overlap(text, BEGIN_TAG)


def _call_schema(function: dict[str, Any]) -> Schema:
    """The schema of a call of one function."""
    parameters = function.get("parameters", {"type": "object"})
    draft = {}
    if isinstance(parameters, dict):
        draft = {key: parameters[key] for key in ("$schema",) if key in parameters}
        parameters = _as_document(parameters)
    return {
        **draft,
        "type": "object",
        "properties": {"name": {"enum": [function["name"]]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _as_document(schema: Schema) -> Schema:
    """A schema whose references mean the same inside of another schema."""
    key = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
    own = str(schema.get(key) or "").partition("#")[0]
    document = {**schema, key: own or "json-schema:///arguments/"}
    if "$ref" in document:
        all_of = [{k: document.pop(k)} for k in ("$ref", "allOf") if k in document]
        document["allOf"] = all_of
    return document


def _json_rule(schema: Schema) -> str:
    """The rule in Lark's notation for JSON of a schema, on one line."""
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def _is_function(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False
