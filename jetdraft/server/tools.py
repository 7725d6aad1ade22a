"""Functions that a model may call: what it may write then, and what it wrote.

A call is {"name": ..., "arguments": {...}}, between <tool_call> and </tool_call> where
the chat template says so, as those of Hermes and Qwen do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from jetdraft.errors import OptionError
from jetdraft.runtime.constraint import SPACING

BEGIN, END = "<tool_call>", "</tool_call>"
ANYTHING = {"type": "object"}


@dataclass(frozen=True)
class Tools:
    """`functions` as OpenAI has them; `choice` is "auto", "required" or a name.

    Tools.of([{"type": "function", "function": {"name": "stop"}}], "auto")
    """

    functions: list[dict[str, Any]]
    choice: str

    @classmethod
    def of(cls, functions: object, choice: object) -> Tools | None:
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
        if not functions or choice == "none":
            return None
        names = [each["function"]["name"] for each in functions]
        if choice not in ("auto", "required", *names):
            raise OptionError(f"tool_choice {choice!r} is none of {', '.join(names)}")
        return cls(functions, choice)

    def grammar(self, template: str) -> str:
        """What may be written, in Lark's notation."""
        marked = BEGIN in template
        call = f'"{BEGIN}" GAP one GAP "{END}"' if marked else "one"
        if marked:
            call = f"{call} (GAP {call})*\nGAP: /\\n?/"
        if self.choice == "auto":
            # A text that does not begin as a call does is a text.
            start = f"start: call | TEXT |\nTEXT: /[^{'<' if marked else '{'}](.|\\n)*/"
        else:
            start = "start: call"
        return f"{start}\ncall: {call}\none: %json {json.dumps(self._schema())}\n"

    def calls(self, text: str) -> list[dict[str, Any]]:
        """The calls in a text, in OpenAI's shape; none where it is a text."""
        parts = text.split(END) if text.startswith(BEGIN) else [text]
        bare = [part.strip().removeprefix(BEGIN) for part in parts]
        try:
            said = [json.loads(part) for part in bare if part]
            return [_call(each["name"], each["arguments"]) for each in said]
        except (ValueError, TypeError, KeyError):
            return []

    def begins_call(self, text: str) -> bool:
        """Whether a text may turn out to be a call."""
        return not text or text[0] in ("{", BEGIN[0])

    def _schema(self) -> dict[str, Any]:
        wanted = [
            each["function"]
            for each in self.functions
            if self.choice in ("auto", "required", each["function"]["name"])
        ]
        shapes = [_shape(each) for each in wanted]
        found = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        return {**found, "x-guidance": SPACING}


def _shape(function: dict[str, Any]) -> dict[str, Any]:
    """Of a call of one function."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters", ANYTHING),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _is_function(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False


def _call(name: str, arguments: object) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": function}
