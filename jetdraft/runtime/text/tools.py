"""Tools, functions that a model may call: their grammar, and the calls in a text."""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from jetdraft.errors import OptionError
from jetdraft.parsing import read_json
from jetdraft.runtime.text import constraint
from jetdraft.runtime.text.stops import overlap
from jetdraft.runtime.text.worker_main import SPACING
from jetdraft.runtime.text.worker_process import Vocabulary

Schema = dict[str, Any]  # A JSON schema.
Lark = Callable[[str], str]  # Writes a text in Lark's notation.
_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: each, or a `listed` list, between `begin` and `end`.

    A call is JSON with the name and the `arguments`. Or else the `name` stands between
    two texts, and the arguments are JSON up to a third text; or pairs of a key and a
    value, in the texts of `pair`: before and after a key, after a value, between pairs.
    Texts in pairs stand between `quotes`, or are texts of Python. A `lead` comes before
    an answer, a `turn` before a call, of which a text then has one.
    """

    begin: str = ""
    end: str = ""
    listed: bool = False
    arguments: str = "arguments"
    name: tuple[str, str, str] | None = None
    pair: tuple[str, str, str, str] | None = None
    quotes: str | None = None
    lead: str = ""
    turn: str = ""

    @classmethod
    def of(cls, template: str) -> "CallFormat":
        """The format in the source of a chat template; without a mark bare JSON."""
        rows = (row for marks, row in _FORMATS if all(m in template for m in marks))
        return next(rows, cls())


HERMES = CallFormat("<tool_call>", "</tool_call>")
_PYTHON: Any = {"listed": True, "name": ("", "(", ")"), "pair": ("", "=", "", ", ")}
_QUOTE = '<|"|>'  # Gemma's.
_COMMENTARY, _MESSAGE = "<|channel|>commentary", "<|message|>"
_XML = CallFormat(
    *("<tool_call>", "</tool_call>"),
    name=("\n<function=", ">\n", "</function>\n"),
    pair=("<parameter=", ">\n", "\n</parameter>\n", ""),
    quotes="",
)
_HARMONY = CallFormat(
    _COMMENTARY + " to=functions.",
    name=("", f" <|constrain|>json{_MESSAGE}", ""),
    lead=f"<|start|>assistant<|channel|>final{_MESSAGE}",
    turn="<|start|>assistant",
)
_GEMMA = CallFormat(
    *("<|tool_call>", "<tool_call|>"),
    name=("call:", "{", "}"),
    pair=("", ":", "", ","),
    quotes=_QUOTE,
)
_LFM2 = CallFormat("<|tool_call_start|>", "<|tool_call_end|>", **_PYTHON)
# By texts that are all in the template; the first row that fits counts.
_FORMATS = (
    (("<tool_call>", "<function=", "<parameter="), _XML),  # Qwen3-Coder, Qwen3.5
    (("<tool_call>",), HERMES),  # Qwen2.5, Qwen3, SmolLM3
    (("<TOOLCALL>",), CallFormat("<TOOLCALL>", "</TOOLCALL>", True)),  # Nemotron
    (("[ARGS]",), CallFormat("[TOOL_CALLS]", name=("", "[ARGS]", ""))),  # Devstral
    (("[TOOL_CALLS]",), CallFormat("[TOOL_CALLS]", listed=True)),  # Mistral Nemo
    ((_COMMENTARY, "functions."), _HARMONY),  # gpt-oss
    (("<|tool_call>",), _GEMMA),  # Gemma 4
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),
    (("[func_name1(",), CallFormat(**_PYTHON)),  # Llama 3.2, Llama 4
    (('"parameters": dictionary',), CallFormat(arguments="parameters")),  # Llama 3
)


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
        try:
            functions, schema = read_json(json.dumps([self.functions, self.schema]))
        except (TypeError, ValueError, RecursionError) as error:
            fact = f"the tools are not JSON ({error}); give each function's name and "
            fact += 'the JSON schema of its "parameters", not the function'
            raise OptionError(fact, "tools") from error
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
        form, lark = self.format, self._lark
        is_auto, is_named = self.choice == "auto", self.choice in self.names
        is_several = self.parallel and not is_named
        begin = lark(form.begin)
        before, inside, calls = begin, "one", "call"
        if form.listed:
            inside = '"[" one (", " one)* "]"' if is_several else '"[" one "]"'
        elif form.begin and is_several and not form.turn:
            calls = f"call (GAP {begin} call)*"
        if form.begin and is_auto and self.schema is None and not form.turn:
            # A text may lead to a mark in any spelling, and then a call must follow.
            before = "before"
        answer = f"{lark(form.lead)} answer | " if is_auto else ""
        gap = "GAP" if form.begin and not form.name else ""
        # A document for each: an id in one may be another's too.
        functions = [tool["function"] for tool in self.functions]
        named = [each for each in functions if each["name"] == self.choice]
        ones = {f"one{n}": each for n, each in enumerate(named or functions)}
        rules = [
            f"start: {answer}{lark(form.turn)} {before} {calls}",
            f"call: {gap} {inside} {gap} {lark(form.end)}",
            f"one: {' | '.join(ones)}",
            r"GAP: /[ \n]?/",
            self._answer_rule(),
        ]
        if form.begin:
            rules.append(f"before{_until(form.begin)}")
        for name, function in ones.items():
            rules += _call_rules(form, name, function, lark)
        return "\n".join(rules + _VALUE_RULES * (form.quotes == _QUOTE))

    def _answer_rule(self) -> str:
        form = self.format
        if self.schema is not None:
            return f"answer: {_json_rule(self.schema)}"
        if not form.begin:
            first = "[" if form.listed else "{"
            return f"answer: TEXT |\nTEXT: /[^\\{first}](.|\\n)*/"
        mark = re.sub(r"[^\w\s<>=]", r"\\\g<0>", form.begin)
        return f"answer: TEXT\nTEXT: {_TEXT} & ~/(.|\\n)*{mark}(.|\\n)*/"

    def _lark(self, text: str) -> str:
        """A text in Lark's notation, its special tokens as tokens; "" for no text."""
        parts = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text)
        writers = json.dumps, self.lark
        return " ".join(writers[n % 2](part) for n, part in enumerate(parts) if part)

    def check(self, vocabulary: Vocabulary) -> None:
        """Compile each schema; raises `OptionError` that names a refused function."""
        end = time.monotonic() + constraint.COMPILE_SECONDS
        for name, tool in zip(self.names, self.functions, strict=True):
            schema = json.dumps(_call_schema(tool["function"]))
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
        if self.format.quotes == _QUOTE:
            return _read_gemma(text, at - 1)
        tool = next(t for t in self.functions if t["function"]["name"] == name)
        properties, parts = _properties(tool["function"]), list[str]()
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
            sure = _sure(said, _QUOTE)
            parts.append(json.dumps(sure)[:-1])
            return "".join(parts), at + len(_QUOTE + sure)
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
    is_text = schema.get("type") == "string" or bool(_texts(schema))
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


def _as_dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _properties(function: dict[str, Any]) -> Schema:
    parameters = _as_dict(function.get("parameters"))
    given = _as_dict(parameters.get("properties"))
    return {name: _as_dict(schema) for name, schema in given.items()}


def _texts(schema: Schema) -> list[str]:
    """The texts that a schema lists, if it lists texts only."""
    found = schema.get("enum", [schema.get("const")])
    is_all = isinstance(found, list) and all(isinstance(text, str) for text in found)
    return found if is_all else []


# Values in Gemma's notation.
_VALUE_RULES = [
    'value: quoted | NUMBER | "true" | "false" | "null" | object | array',
    'object: "{" (pair ("," pair)*)? "}"',
    'pair: (KEY | quoted) ":" value',
    'array: "[" (value ("," value)*)? "]"',
    f"quoted: {json.dumps(_QUOTE)} text",
    f"text[suffix={json.dumps(_QUOTE)}]: {_TEXT}",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    r"KEY: /[A-Za-z_][A-Za-z0-9_]*/",
]


def _until(mark: str) -> str:
    """The end of a rule for a text up to a mark, and the mark."""
    return f"[suffix={json.dumps(mark)}]: {_TEXT}"


def _call_rules(form: CallFormat, name: str, function: Schema, lark: Lark) -> list[str]:
    """The rules of a call of one function; the first is called `name`."""
    if form.name is None:
        return [f"{name}: {_json_rule(_call_schema(function, form.arguments))}"]
    before, after, close = form.name
    head = f"{name}: {lark(before + function['name'] + after)}"
    parameters = _as_dict(function.get("parameters"))
    if form.pair is None:
        schema = {"type": "object", **parameters}
        return [f"{head} {name}a {lark(close)}", f"{name}a: {_json_rule(schema)}"]
    before_key, after_key, _, between = form.pair
    rules, items = [f"{head} {name}_0_0 {lark(close)}"], []
    shared = {k: v for k, v in parameters.items() if k in ("$defs", "definitions")}
    for n, (key, schema) in enumerate(_properties(function).items()):
        rules += _value_rules(form, f"{name}v{n}", {**shared, **schema}, lark)
        items.append((f"{lark(before_key + key + after_key)} {name}v{n}", key))
    needed = parameters.get("required")
    needed = needed if isinstance(needed, list) else []
    for n, (item, key) in enumerate(items):
        # After the first n pairs, of which some were written or none.
        for some, comma in ((0, ""), (1, lark(between))):
            skip = "" if key in needed else f" | {name}_{n + 1}_{some}"
            rules.append(f"{name}_{n}_{some}: {comma} {item} {name}_{n + 1}_1{skip}")
    rules += [f'{name}_{len(items)}_{some}: ""' for some in (0, 1)]
    return rules


def _value_rules(form: CallFormat, name: str, schema: Schema, lark: Lark) -> list[str]:
    quote, after = form.quotes, form.pair[2] if form.pair else ""
    kind = schema.get("type")
    if quote is not None and (texts := _texts(schema)):
        each = (lark(quote + text + quote + after) for text in texts)
        return [f"{name}: {' | '.join(each)}"]
    if quote is not None and kind == "string":
        return [f"{name}: {lark(quote)} {name}t", f"{name}t{_until(quote + after)}"]
    if quote == _QUOTE and kind not in ("integer", "number", "boolean"):
        return [f"{name}: value"]
    if quote is None and kind == "boolean":
        return [f'{name}: "True" | "False"']
    return [f"{name}: {name}j {lark(after)}", f"{name}j: {_json_rule(schema)}"]


def _call_schema(function: dict[str, Any], key: str = "arguments") -> Schema:
    """The schema of a call of one function, whose arguments have this `key`."""
    parameters = function.get("parameters", {"type": "object"})
    draft = {own: v for own, v in _as_dict(parameters).items() if own == "$schema"}
    if isinstance(parameters, dict):
        parameters = _as_document(parameters)
    return {
        **draft,
        "type": "object",
        "properties": {"name": {"enum": [function["name"]]}, key: parameters},
        "required": ["name", key],
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
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def _is_function(tool: object) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str()}}:
            return True
    return False
