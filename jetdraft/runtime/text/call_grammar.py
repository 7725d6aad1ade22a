"""How models write calls of functions, and the grammar of a text with such calls."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jetdraft.runtime.text.worker_main import SPACING

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
GEMMA_QUOTE = '<|"|>'
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
    quotes=GEMMA_QUOTE,
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
class CallGrammar:
    """The grammar of a text that calls `functions` in a format.

    `lark` writes a text in Lark's notation. With `is_several` the text may have several
    calls, if its format allows that.
    """

    format: CallFormat
    lark: Lark
    functions: Sequence[dict[str, Any]]
    is_several: bool

    def write(self, is_auto: bool, schema: Schema | None) -> str:
        """The grammar in Lark's notation; with `is_auto` an answer needs no call.

        An answer without a call is JSON of the `schema`, or any text.
        """
        form, lark = self.format, self._with_tokens
        begin = lark(form.begin)
        before, inside, calls = begin, "one", "call"
        if form.listed:
            inside = '"[" one (", " one)* "]"' if self.is_several else '"[" one "]"'
        elif form.begin and self.is_several and not form.turn:
            calls = f"call (GAP {begin} call)*"
        if form.begin and is_auto and schema is None and not form.turn:
            # A text may lead to a mark in any spelling, and then a call must follow.
            before = "before"
        answer = f"{lark(form.lead)} answer | " if is_auto else ""
        gap = "GAP" if form.begin and not form.name else ""
        # A document for each: an id in one may be another's too.
        ones = {f"one{n}": each for n, each in enumerate(self.functions)}
        rules = [
            f"start: {answer}{lark(form.turn)} {before} {calls}",
            f"call: {gap} {inside} {gap} {lark(form.end)}",
            f"one: {' | '.join(ones)}",
            r"GAP: /[ \n]?/",
            self._answer_rule(schema),
        ]
        if form.begin:
            rules.append(f"before{_until(form.begin)}")
        for name, function in ones.items():
            rules += self._call_rules(name, function)
        return "\n".join(rules + _VALUE_RULES * (form.quotes == GEMMA_QUOTE))

    def _with_tokens(self, text: str) -> str:
        """A text in Lark's notation, its special tokens as tokens; "" for no text."""
        parts = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text)
        writers = json.dumps, self.lark
        return " ".join(writers[n % 2](part) for n, part in enumerate(parts) if part)

    def _answer_rule(self, schema: Schema | None) -> str:
        form = self.format
        if schema is not None:
            return f"answer: {_json_rule(schema)}"
        if not form.begin:
            first = "[" if form.listed else "{"
            return f"answer: TEXT |\nTEXT: /[^\\{first}](.|\\n)*/"
        mark = re.sub(r"[^\w\s<>=]", r"\\\g<0>", form.begin)
        return f"answer: TEXT\nTEXT: {_TEXT} & ~/(.|\\n)*{mark}(.|\\n)*/"

    def _call_rules(self, name: str, function: Schema) -> list[str]:
        """The rules of a call of one function; the first is called `name`."""
        form, lark = self.format, self._with_tokens
        if form.name is None:
            return [f"{name}: {_json_rule(call_schema(function, form.arguments))}"]
        before, after, close = form.name
        head = f"{name}: {lark(before + function['name'] + after)}"
        parameters = _as_dict(function.get("parameters"))
        if form.pair is None:
            schema = {"type": "object", **parameters}
            return [f"{head} {name}a {lark(close)}", f"{name}a: {_json_rule(schema)}"]
        before_key, after_key, _, between = form.pair
        rules, items = [f"{head} {name}_0_0 {lark(close)}"], []
        shared = {k: v for k, v in parameters.items() if k in ("$defs", "definitions")}
        for n, (key, schema) in enumerate(properties_of(function).items()):
            rules += self._value_rules(f"{name}v{n}", {**shared, **schema})
            items.append((f"{lark(before_key + key + after_key)} {name}v{n}", key))
        needed = parameters.get("required")
        needed = needed if isinstance(needed, list) else []
        for n, (item, key) in enumerate(items):
            # After the first n pairs, of which some were written or none.
            rest = f"{name}_{n + 1}"
            for some, comma in ((0, ""), (1, lark(between))):
                skip = "" if key in needed else f" | {rest}_{some}"
                rules.append(f"{name}_{n}_{some}: {comma} {item} {rest}_1{skip}")
        return rules + [f'{name}_{len(items)}_{some}: ""' for some in (0, 1)]

    def _value_rules(self, name: str, schema: Schema) -> list[str]:
        form, lark, kind = self.format, self._with_tokens, schema.get("type")
        quote, after = form.quotes, form.pair[2] if form.pair else ""
        if quote is not None and (texts := texts_of(schema)):
            each = (lark(quote + text + quote + after) for text in texts)
            return [f"{name}: {' | '.join(each)}"]
        if quote is not None and kind == "string":
            return [f"{name}: {lark(quote)} {name}t", f"{name}t{_until(quote + after)}"]
        if quote == GEMMA_QUOTE and kind not in ("integer", "number", "boolean"):
            return [f"{name}: value"]
        if quote is None and kind == "boolean":
            return [f'{name}: "True" | "False"']
        return [f"{name}: {name}j {lark(after)}", f"{name}j: {_json_rule(schema)}"]


# Values in Gemma's notation.
_VALUE_RULES = [
    'value: quoted | NUMBER | "true" | "false" | "null" | object | array',
    'object: "{" (pair ("," pair)*)? "}"',
    'pair: (KEY | quoted) ":" value',
    'array: "[" (value ("," value)*)? "]"',
    f"quoted: {json.dumps(GEMMA_QUOTE)} text",
    f"text[suffix={json.dumps(GEMMA_QUOTE)}]: {_TEXT}",
    r"NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    r"KEY: /[A-Za-z_][A-Za-z0-9_]*/",
]


def _until(mark: str) -> str:
    """The end of a rule for a text up to a mark, and the mark."""
    return f"[suffix={json.dumps(mark)}]: {_TEXT}"


def _json_rule(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def call_schema(function: dict[str, Any], key: str = "arguments") -> Schema:
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


def properties_of(function: dict[str, Any]) -> Schema:
    """The schemas of a function's parameters, by their names."""
    parameters = _as_dict(function.get("parameters"))
    given = _as_dict(parameters.get("properties"))
    return {name: _as_dict(schema) for name, schema in given.items()}


def texts_of(schema: Schema) -> list[str]:
    """The texts that a schema lists, if it lists texts only."""
    found = schema.get("enum", [schema.get("const")])
    is_all = isinstance(found, list) and all(isinstance(text, str) for text in found)
    return found if is_all else []


def _as_dict(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}
