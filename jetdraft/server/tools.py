"""Functions that a model may call: what it may write then, and what it wrote.

A call is {"name": ..., "arguments": {...}}, between <tool_call> and </tool_call> where
the chat template says so, as those of Hermes and Qwen do.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from jetdraft.errors import ConstraintError, OptionError
from jetdraft.runtime.text.constraint import SPACING, Constraint, Vocabulary

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
"""What is no call, with marks and without."""


@dataclass(frozen=True)
class Tools:
    """`functions` as OpenAI has them; `choice` is "auto", "required" or a name.

    `marked` says whether calls stand between marks, `parallel` whether there may be
    several then, and `schema` what JSON an answer must be that is none.

        Tools([{"type": "function", "function": {"name": "stop"}}], "auto").grammar()
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    marked: bool = False
    parallel: bool = True
    schema: Schema | None = None

    @classmethod
    def of(cls, functions: object, choice: object, **more: Any) -> Tools | None:
        """Of a request's `tools` and `tool_choice`, None where there are none."""
        if not isinstance(functions, list) or not all(map(_is_function, functions)):
            raise OptionError(
                'give tools as [{"type": "function", "function": {"name": ...}}]'
            )
        match choice:
            case {"type": "function", "function": {"name": str(name)}}:
                choice = name
            case str():
                pass
            case _:
                raise OptionError(
                    'tool_choice must be "auto", "none", "required" or a function'
                )
        if not functions and choice not in ("auto", "none"):
            raise OptionError(f"tool_choice {choice!r} needs tools; give some")
        if not functions or choice == "none":
            return None
        found = cls(functions, choice, **more)
        if choice not in ("auto", "required", *found.names):
            names = ", ".join(found.names)
            raise OptionError(f"tool_choice {choice!r} is none of {names}")
        return found

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [each["function"]["name"] for each in self.functions]

    def grammar(self) -> str:
        """What may be written, in Lark's notation."""
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
        """Raise `ConstraintError` for the first function whose schema is refused."""
        for tool in self.functions:
            shape = json.dumps(_shape(tool["function"]))
            try:
                vocabulary.matcher(Constraint("JSON schema", shape), 0)
            except ConstraintError as error:
                name = tool["function"]["name"]
                raise ConstraintError(f"tool {name!r}: {error}") from error

    def calls(self, text: str) -> list[dict[str, Any]]:
        """The calls in a text, in OpenAI's shape; none where one is not whole."""
        found, decode = [], json.JSONDecoder().raw_decode
        at = self._next(text, 0)
        try:
            while at is not None:
                said, end = decode(text, at)
                if said["name"] not in self.names:
                    return []
                found.append(_call(said["name"], said["arguments"]))
                at = self._next(text, end)
        except (ValueError, TypeError, KeyError):
            return []
        return found

    def _next(self, text: str, start: int) -> int | None:
        """Where the next call's JSON begins."""
        pattern = f"{BEGIN}\\s*" if self.marked else r"\A(?=\{)"
        found = re.compile(pattern).search(text, start)
        return found.end() if found else None

    def shown(self, text: str) -> int:
        """How much of a text is no call, whatever comes next."""
        if not self.marked:
            return 0 if text.startswith("{") else len(text)
        at = text.find(BEGIN)
        if at >= 0:
            return at
        most = min(len(text), len(BEGIN) - 1)
        held = (n for n in range(most, 0, -1) if text.endswith(BEGIN[:n]))
        return len(text) - next(held, 0)

    def _schema(self) -> Schema:
        """Of a call of any function that may be called."""
        shapes = [
            _shape(each["function"])
            for each in self.functions
            if self.choice in ("auto", "required", each["function"]["name"])
        ]
        return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}


def _shape(function: dict[str, Any]) -> Schema:
    """Of a call of one function."""
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


def _call(name: str, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}
