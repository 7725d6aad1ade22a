"""Tools, functions that a model may call, and the calls in a text."""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from jetdraft.errors import OptionError, as_error
from jetdraft.parsing import read_json
from jetdraft.runtime.text import call_grammar, constraint
from jetdraft.runtime.text.call_grammar import CallFormat, CallGrammar, Lark, Schema
from jetdraft.runtime.text.stops import overlap
from jetdraft.runtime.text.worker_process import Vocabulary


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: the function's `name` and its `arguments`.

    `arguments` is JSON of the function's schema. The `id` is random, in the form that
    all known chat templates take. `text` has the arguments as JSON, as the model wrote
    them or translated while they were written.

        [call] = model.chat(messages, tools=tools).calls
        call.name, call.arguments    # "read_sensor", {"sensor": "battery"}
    """

    name: str
    arguments: Any
    id: str = field(default_factory=lambda: uuid4().hex[:9])
    text: str = field(default="", repr=False)

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def for_openai(self) -> dict[str, Any]:
        """The call as OpenAI sends it, whose arguments are a JSON text."""
        text = self.text or json.dumps(self.arguments)
        return replace(self, arguments=text).for_template()


@dataclass(frozen=True)
class Tools:
    """Functions that a model may call, for `Conversation`, `Model.chat` and the server.

    `functions` are in OpenAI's form; `choice` is "auto", "required" (it must call) or
    the name of the function that it must call, once. With `parallel` a text may have
    several calls, if its format allows that. `Model` sets the `format`, and how to
    write a text in a `lark` grammar. `schema` is the JSON schema of an answer without a
    call. Raises `OptionError`.

        tools = Tools([{"type": "function", "function": {"name": "stop"}}])
        model.chat(messages, tools=tools).calls
    """

    functions: list[dict[str, Any]]
    choice: str = "auto"
    format: CallFormat = CallFormat()
    parallel: bool = True
    schema: Schema | None = None
    lark: Lark = json.dumps

    def __post_init__(self) -> None:
        fix = 'give each function\'s name and the JSON schema of its "parameters"'
        causes = TypeError, ValueError, RecursionError
        with as_error(OptionError, causes, "the tools are not JSON", fix, "tools"):
            functions, schema = read_json(json.dumps([self.functions, self.schema]))
        if not isinstance(functions, list) or not all(map(_is_function, functions)):
            form = '[{"type": "function", "function": {"name": ...}}]'
            raise OptionError(f"give tools as {form}", "tools")
        constraint.check_exact_numbers([functions, schema], "tools")
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
                rule = '"auto", "none", "required" or a function'
                raise OptionError(f"tool_choice must be {rule}")
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
        functions = [tool["function"] for tool in self.functions]
        named = [each for each in functions if each["name"] == self.choice]
        is_several, is_auto = self.parallel and not named, self.choice == "auto"
        grammar = CallGrammar(self.format, self.lark, named or functions, is_several)
        return grammar.write(is_auto, self.schema)

    def check(self, vocabulary: Vocabulary) -> None:
        """Compile each schema; raises `OptionError` that names a refused function."""
        end = time.monotonic() + constraint.COMPILE_SECONDS
        for name, tool in zip(self.names, self.functions, strict=True):
            schema = json.dumps(call_grammar.call_schema(tool["function"]))
            try:
                own = constraint.Constraint("JSON schema", schema)
                given = vocabulary, own, 0, lambda: time.monotonic() > end
                constraint.Matcher(*given).prepare()
            except OptionError as error:
                raise OptionError(f"tool {name!r}: {error}", "constraint") from error

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in a text, up to the first broken call."""
        return self.read(text)[0]

    def read(self, text: str, begun: bool = False) -> tuple[list[ToolCall], str]:
        """The calls in a text, and the text without them.

        A call that is broken, or of an unknown function, and all after it is text. But
        with `begun`, a call counts as soon as its arguments begin: its `text` is what
        came of them, and its `arguments` are None until they end.

            calls, said = tools.read(text_so_far, begun=True)
        """
        calls, said, at, is_broken = list[ToolCall](), "", 0, False
        while not is_broken and (begin := self._find_call(text, at)) >= 0:
            start = begin + len(self.format.begin)
            found, end = self._read_begun(text, start)
            try:
                found, end = self._read_calls(text, start, found, end)
            except _BROKEN:
                is_broken = True
                if not (begun and found):
                    break
            calls, said, at = calls + found, said + text[at:begin], end
        return calls, said + text[at:]

    def _read_begun(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """Calls at a place, of which the last may break off, and where they end."""
        calls, form = list[ToolCall](), self.format
        mark = "[" * form.listed
        while (head := self._head.match(text, at)) and head["mark"] == mark:
            name, mark, arguments = head["name"], ",", None
            written, at = self._arguments(name, text, head.end())
            with suppress(*_BROKEN):
                arguments = json.loads(written)
            calls.append(ToolCall(name, arguments, text=written))
            if form.name is None:  # the object that holds them
                with suppress(ValueError):
                    at = _skip(text, at, "}")
        return calls, at

    @cached_property
    def _head(self) -> re.Pattern[str]:
        """A call up to its arguments, or to the `{` of arguments that are JSON."""
        form = self.format
        name = f"(?P<name>{'|'.join(map(re.escape, self.names))})"
        first = rf"\s*(?P<mark>[\[,]{{{int(form.listed)}}})\s*"
        if form.name:
            before, after = re.escape(form.name[0].strip()), re.escape(form.name[1])
            ahead = "" if form.pair else r"(?=\{)"
            return re.compile(f"{first}{before}{name}{after}{ahead}")
        keys = rf'\s*"name"\s*:\s*"{name}"\s*,\s*"{form.arguments}"\s*:\s*'
        return re.compile(first + r"\{" + keys + r"(?=\{)")

    def _arguments(self, name: str, text: str, at: int) -> tuple[str, int]:
        """Arguments as JSON, as far as they are written, and where they end."""
        if self.format.pair is None:
            return _read_value(text, at)
        if self.format.quotes == call_grammar.GEMMA_QUOTE:
            return _read_gemma(text, at - 1)
        tool = next(t for t in self.functions if t["function"]["name"] == name)
        properties, parts = call_grammar.properties_of(tool["function"]), list[str]()
        key, read, close = _NOTATIONS[self.format.quotes]
        end = ""
        while match := key.match(text, at):
            value, at = read(text, match.end(), properties.get(match[1], {}))
            parts.append(f"{json.dumps(match[1])}: {value}")
            if not value:
                break
        else:
            with suppress(ValueError):
                at, end = _skip(text, at, close), "}"
        return "{" + ", ".join(parts) + end, at

    def _find_call(self, text: str, start: int) -> int:
        """Where the next call begins, from `start` on; -1 without a call."""
        if self.format.begin:
            return text.find(self.format.begin, start)
        first = "[" if self.format.listed else "{"
        return 0 if start == 0 and text.startswith(first) else -1

    def _read_calls(
        self, text: str, at: int, begun: list[ToolCall], end: int
    ) -> tuple[list[ToolCall], int]:
        """Calls that `begun` begin, and where they end; raises if a call is broken."""
        form = self.format
        if form.name is None:
            value, end = _decode(text, _skip(text, at))
            listed = value if form.listed else [value]
            keys = "arguments", "parameters"
            pairs = [(c["name"], c[keys["arguments" not in c]]) for c in listed]
        else:
            pairs = [(call.name, json.loads(call.text)) for call in begun]
            end = _skip(text, end, "]") if form.listed else end
        # Infinite numbers and lone surrogates are no JSON.
        json.dumps(pairs, ensure_ascii=False, allow_nan=False).encode()
        same = (p == (c.name, c.arguments) for p, c in zip(pairs, begun, strict=False))
        is_known = {name for name, _ in pairs} <= {*self.names}
        if not (pairs and is_known and all(same)):
            raise ValueError(text)
        after_space = _skip(text, end)
        if form.end and text.startswith(form.end, after_space):
            end = after_space + len(form.end)
        return begun + [ToolCall(*pair) for pair in pairs[len(begun) :]], end

    def shown(self, text: str) -> int:
        """How many characters come before all calls and the space before a call."""
        at, begin = self._find_call(text, 0), self.format.begin
        if at < 0:
            at = len(text) - (overlap(text, begin) if begin else 0)
        return len(text[:at].rstrip())


_BROKEN = (
    *(ValueError, TypeError, KeyError, RecursionError, StopIteration, SyntaxError),
    *(MemoryError, AttributeError),
)
_decode = json.JSONDecoder().raw_decode
# It finds the end of numbers with more digits than Python reads.
_decode_long = json.JSONDecoder(parse_int=str).raw_decode


def _skip(text: str, at: int, mark: str = "") -> int:
    """The place after white space and a mark; raises `ValueError` for another text."""
    at = len(text) - len(text[at:].lstrip())
    if not text.startswith(mark, at):
        raise ValueError(text[at:])
    return at + len(mark)


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _read_value(text: str, at: int) -> tuple[str, int]:
    """A value in JSON, as far as it is written, and where that ends."""
    with suppress(*_BROKEN):
        _, end = _decode_long(text, at)
        return text[at:end], end
    end = len(text) if text.startswith(('"', "[", "{"), at) else at
    return text[at:end], end


def _read_python(text: str, at: int, _: Schema) -> tuple[str, int]:
    """A value in Python's notation as JSON, like `_read_value`."""
    words = (word for word in _PYTHON_WORDS if text.startswith(word, at))
    found = next(((_PYTHON_WORDS[w], at + len(w)) for w in words), None)
    return found or _read_value(text, at)


def _read_gemma(text: str, at: int) -> tuple[str, int]:
    """Arguments in Gemma's notation, `{x:<|"|>a<|"|>,y:[1]}`, like `_read_value`."""
    parts, depth = list[str](), 0
    while token := _GEMMA_TOKEN.match(text, at):
        said, key = token["said"], token["key"]
        if said is not None and not token["end"]:
            sure = _sure(said, call_grammar.GEMMA_QUOTE)
            parts.append(json.dumps(sure)[:-1])
            return "".join(parts), at + len(call_grammar.GEMMA_QUOTE + sure)
        quoted = key if said is None else said
        parts.append(token[0] if quoted is None else json.dumps(quoted))
        at = token.end()
        depth += (token[0] in "{[") - (token[0] in "}]")
        if not depth:
            break
    return "".join(parts), at


# A text, a key, a number or word that has ended, or a sign.
_GEMMA_TOKEN = re.compile(
    r'<\|"\|>(?P<said>(?s:.*?))(?P<end><\|"\|>|\Z)|(?P<key>[^\s{}\[\],:<]+)(?=\s*:)'
    r"|[^\s{}\[\],:<]+(?=\s*[,}\]])|[\s{}\[\],:]"
)


def _read_parameter(text: str, at: int, schema: Schema) -> tuple[str, int]:
    """A value in XML of Qwen3-Coder as JSON, like `_read_value`; a text in pieces."""
    value, closed, _ = text[at:].partition(mark := "\n</parameter>\n")
    is_text = schema.get("type") == "string" or bool(call_grammar.texts_of(schema))
    if not closed:
        sure = _sure(value, mark) if is_text else ""
        quoted = json.dumps(sure.removeprefix("\n"))[:-1]
        return quoted if is_text else "", at + len(sure)
    at, value = at + len(value + closed), value.removeprefix("\n")
    written = json.dumps(value)
    if not is_text:
        with suppress(ValueError, RecursionError):
            written = json.dumps(json.loads(_PYTHON_WORDS.get(value, value)))
    return written, at


# Of formats by `quotes`: a key's pattern, the reader of values, the end of a call.
_NOTATIONS = {
    None: (re.compile(r"[\s,]*([^\s=(),]+)=\s*"), _read_python, ")"),
    "": (re.compile(r"\s*<parameter=([^>]+)>"), _read_parameter, "</function>"),
}


def _sure(text: str, mark: str) -> str:
    """A text without an ending that may begin a mark."""
    return text[: len(text) - overlap(text, mark)]


def _is_function(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False
