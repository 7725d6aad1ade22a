"""Tools, functions that a model may call: their grammar, and the calls in a text.

A call is {"name": ..., "arguments": {...}}. It stands between <tool_call> and
</tool_call> if the chat template says so, for example in Hermes and Qwen.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jetdraft.errors import OptionError
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.matcher import COMPILE_SECONDS
from jetdraft.runtime.text.vocabulary import Vocabulary
from jetdraft.runtime.text.worker import SPACING
from jetdraft.untrusted.json_text import read_json

Schema = dict[str, Any]

BEGIN, END = "<tool_call>", "</tool_call>"

MARKED = f"""
before[suffix="{BEGIN}"]: /(.|\\n)*/
BEGIN: "{BEGIN}"
GAP: /\\n?/
call: GAP one GAP "{END}"
"""
TEXT = {
    True: f"answer: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{BEGIN}(.|\\n)*/",
    False: "answer: TEXT |\nTEXT: /[^{](.|\\n)*/",
}
"""The rule of a text without a call, for marked calls and for unmarked calls."""


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the function's `name` and its `arguments`.

    `arguments` is JSON of the function's schema, mostly a dict. The `id` is random, in
    the form that all known chat templates take.

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
    the name of the function that it must call. Where a chat template marks calls, a
    text may have several unless `parallel` is false; `marked` is set by `Model`.
    `schema` is the JSON schema of an answer without a call. Raises `OptionError`.

        tools = Tools([{"type": "function", "function": {"name": "stop"}}])
        model.chat(messages, tools=tools).calls
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    marked: bool = False
    parallel: bool = True
    schema: Schema | None = None

    def __post_init__(self) -> None:
        try:
            functions, _ = read_json(json.dumps([self.functions, self.schema]))
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
        if not functions:
            raise OptionError(f"tool_choice {self.choice!r} needs tools; give some")
        if self.choice not in ("auto", "required", *self.names):
            names = ", ".join(self.names)
            raise OptionError(f"tool_choice {self.choice!r} is none of {names}")

    @classmethod
    def of(cls, functions: object, choice: object, **more: Any) -> Tools | None:
        """Read a request's `tools` and `tool_choice`; None without tools.

        Raises `OptionError`.
        """
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
        """Return the names of the functions."""
        return [tool["function"]["name"] for tool in self.functions]

    def grammar(self) -> str:
        """Return the grammar of an answer, in Lark's notation."""
        calls = "call"
        if self.marked and self.parallel:
            calls = "call (GAP BEGIN call)*"
        if self.choice == "auto":
            before = "BEGIN" if self.schema is not None else "before"
            start = f"answer | {before} {calls}" if self.marked else "answer | call"
        else:
            start = f"BEGIN {calls}" if self.marked else "call"
        answer = TEXT[self.marked]
        if self.schema is not None:
            answer = f"answer: {_json(self.schema)}"
        rules = MARKED if self.marked else "call: one"
        return f"start: {start}\n{answer}\n{rules}\none: {_json(self._schema())}\n"

    def check(self, vocabulary: Vocabulary) -> None:
        """Raise `OptionError` for the first function with a refused schema.

        It looks at them for `COMPILE_SECONDS` in all.
        """
        end = time.monotonic() + COMPILE_SECONDS
        for tool in self.functions:
            schema = json.dumps(_call_schema(tool["function"]))
            try:
                constraint = Constraint("JSON schema", schema)
                vocabulary.matcher(
                    constraint, 0, lambda: time.monotonic() > end
                ).prepare()
            except OptionError as error:
                name = tool["function"]["name"]
                raise OptionError(f"tool {name!r}: {error}", "constraint") from error

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a text; none if a call is incomplete."""
        calls: list[ToolCall] = []
        decode = json.JSONDecoder().raw_decode
        at = self._next(text, 0)
        try:
            while at is not None:
                _, end = decode(text, at)
                call = read_json(text[at:end])  # infinite numbers are no JSON
                if call["name"] not in self.names:
                    return []
                calls.append(ToolCall(call["name"], call["arguments"]))
                at = self._next(text, end)
        except (ValueError, TypeError, KeyError, RecursionError):
            return []
        return calls

    def _next(self, text: str, start: int) -> int | None:
        """Return the place of the next call's JSON, or None."""
        pattern = f"{BEGIN}\\s*" if self.marked else r"\A(?=\{)"
        match = re.compile(pattern).search(text, start)
        return match.end() if match else None

    def shown(self, text: str) -> int:
        """Return how many characters cannot become a call, whatever text follows."""
        if not self.marked:
            return 0 if text.startswith("{") else len(text)
        at = text.find(BEGIN)
        if at >= 0:
            return at
        most = min(len(text), len(BEGIN) - 1)
        held = (n for n in range(most, 0, -1) if text.endswith(BEGIN[:n]))
        return len(text) - next(held, 0)

    def _schema(self) -> Schema:
        """Return the schema of a call of any allowed function."""
        schemas = [
            _call_schema(tool["function"])
            for tool in self.functions
            if self.choice in ("auto", "required", tool["function"]["name"])
        ]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _call_schema(function: dict[str, Any]) -> Schema:
    """Return the schema of a call of one function."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters", {"type": "object"}),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def _is_function(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False
