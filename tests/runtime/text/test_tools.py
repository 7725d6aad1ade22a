import json
import re
from functools import reduce

import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.text.call_grammar import HERMES, CallFormat
from jetdraft.runtime.text.constraint import Constraint, Matcher
from jetdraft.runtime.text.template import user_message
from jetdraft.runtime.text.tools import Tools
from tests import cases
from tests.programs import refused_option


def tool(parameters, name="f"):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def record(**properties):
    """The schema of an object that has all of these properties and no other."""
    fields = {"properties": properties, "required": [*properties]}
    return {"type": "object", **fields, "additionalProperties": False}


F = tool({"type": "object"})
G = tool({"const": {"mark": "</tool_call>"}}, "g")
CALL = '{"name": "f", "arguments": {}}'
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
OTHER = '<tool_call>{"name": "g", "arguments": {"mark": "</tool_call>"}}</tool_call>'


@pytest.fixture
def model(toy_model):
    return toy_model


def allowed(model, tools, text):
    matcher = Matcher(model.vocabulary, Constraint("grammar", tools.grammar()), 1)
    ids = model.parts.text.encode(text, add_special=False)
    rows = Rows.chain([0, *ids, model.bundle.eos_token_ids[0]])
    return len(matcher.allowed(rows, [0])) == len(rows)


@cases(
    "options, texts",
    ({}, {"": True, "Hello": True, "<b>": True, CALL: True, "{": False}),
    ({"choice": "required"}, {CALL: True, "Hello": False, "": False}),
    ({"format": HERMES},
     {"": True, "Hello": True, "<think> {": True, CALL: True, MARKED: True,
      f"I call.\n{MARKED}": True, f"{MARKED}\n{OTHER}": True,
      "<tool_call>": False, "a <tool_call> b": False, MARKED[:-1]: False}),
    ({"format": HERMES, "choice": "f"},
     {MARKED: True, f"{MARKED}{MARKED}": False, "Hello": False, OTHER: False}),
    ({"format": HERMES, "choice": "required"}, {f"{MARKED}{MARKED}": True}),
    ({"format": HERMES, "parallel": False}, {f"{MARKED}{MARKED}": False}),
    ({"schema": {"const": 5}}, {"5": True, CALL: True, "Hello": False}),
    ({"schema": {"const": 5}, "format": HERMES},
     {"5": True, MARKED: True, f"Hi {MARKED}": False, "Hello": False}),
)  # fmt: skip
def test_what_may_be_written(model, options, texts):
    tools = Tools([F, G], **options)
    assert {text: allowed(model, tools, text) for text in texts} == texts


@cases(
    "marked, text, names",
    (False, CALL, ["f"]),
    (False, f" {CALL}", []),
    (False, CALL[:-1], []),
    (False, '{"name": "h", "arguments": {}}', []),
    (False, '{"age": 5}', []),
    (True, CALL, []),
    (True, f"I call.\n{MARKED}\n{OTHER}", ["f", "g"]),
    (True, f"{MARKED}\n<tool_call>{{", ["f"]),
    (True, "<tool_call>{", []),
)
def test_what_is_a_call(marked, text, names):
    calls = Tools([F, G], format=HERMES if marked else CallFormat()).calls(text)
    assert [call.name for call in calls] == names
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(call.arguments, dict)
        assert json.loads(call.for_openai()["function"]["arguments"]) == call.arguments
        assert call.for_template()["function"]["arguments"] == call.arguments


@cases(
    "marked, text, shown",
    (False, "a {", "a {"),
    (False, "{ a", ""),
    (True, "{ a", "{ a"),
    (True, "a < b <tool", "a < b"),
    (True, "a <tool_call> b <tool", "a"),
)
def test_what_is_certainly_no_call(marked, text, shown):
    tools = Tools([F], format=HERMES if marked else CallFormat())
    assert text[: tools.shown(text)] == shown


DEEP = reduce(lambda value, _: {"items": value}, range(5000), {})


@cases("parameters", DEEP, {"const": object()}, {"const": float("nan")}, {"\ud800": {}})
def test_tools_that_are_no_json_are_refused(parameters):
    with refused_option("the tools are not JSON", "tools"):
        Tools([tool(parameters)])


@pytest.mark.parametrize(
    ("functions", "choice"),
    [([], "auto"), ([{}], "auto"), ("f", "auto"), ([F], "h"), ([F], None), (None, "f")],
)
def test_tools_that_cannot_be_used_are_refused(functions, choice):
    with pytest.raises(OptionError):
        Tools(functions, choice)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**64), 10**30, 10**300])
def test_the_integers_of_a_call_are_those_that_were_written(number):
    [call] = Tools([F]).calls(f'{{"name": "f", "arguments": {{"x": {number}}}}}')
    assert call.arguments == {"x": number}
    assert json.loads(call.for_openai()["function"]["arguments"]) == {"x": number}


@pytest.mark.parametrize("value", ["1e999", "-1e999", "NaN", "9" * 5000, "[" * 200_000])
def test_a_call_that_json_cannot_hold_is_no_call(value):
    text = '{"name": "f", "arguments": {"x": %s}}'
    assert len(Tools([F]).calls(text % 5)) == 1
    assert Tools([F]).calls(text % value) == []


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
    "required": ["v"],
    "additionalProperties": False,
}
KID = {"properties": {"kid": {"$ref": "#"}}, "additionalProperties": False}
ID, DRAFT = "https://example.com/args", "http://json-schema.org/draft-0{}/schema#"
X = {"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "type": "object"}
DOCUMENTS = {
    "an enum of pydantic": (
        {
            "$defs": {"S": {"enum": ["battery"]}},
            "properties": {"sensor": {"$ref": "#/$defs/S"}},
            "required": ["sensor"],
        },
        {"sensor": "battery"}, {"sensor": "speed"},
    ),
    "a class of pydantic that holds itself": (
        {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
        {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {}},
    ),
    "the root": (
        {"type": "object", **KID},
        {"kid": {"kid": {}}}, {"kid": {"name": "f", "arguments": {}}},
    ),
    "an older draft": (
        {"$schema": DRAFT.format(7), "$ref": "#/definitions/X", "definitions": {"X": X},
         "title": "T"},
        {"a": "x"}, {"a": "y"},
    ),
    "the oldest draft": (
        {"$schema": DRAFT.format(4), "id": f"{ID}#", "type": "object", **KID},
        {"kid": {"kid": {}}}, {"kid": {"name": "f", "arguments": {}}},
    ),
    "an id of nothing": (
        {"$id": "#", "type": "object", **KID},
        {"kid": {"kid": {}}}, {"kid": {"name": "f", "arguments": {}}},
    ),
    "ids and anchors": (
        {
            "$id": ID,
            "properties": {
                "a": {"$ref": f"{ID}#/$defs/A"}, "b": {"$ref": "b"},
                "c": {"$ref": "#here"},
            },
            "required": ["a", "b", "c"],
            "$defs": {
                "A": {"enum": ["x"]}, "B": {"$id": "b", "enum": ["y"]},
                "C": {"$anchor": "here", "enum": ["z"]},
            },
        },
        {"a": "x", "b": "y", "c": "z"}, {"a": "x", "b": "y", "c": "x"},
    ),
    "documents inside a document": (
        {
            "properties": {
                "a": {
                    "$id": "in", "properties": {"k": {"$ref": "#/$defs/K"}},
                    "required": ["k"], "$defs": {"K": {"enum": ["inner"]}},
                    "type": "object",
                },
                "b": {"$ref": "#/$defs/K"},
            },
            "required": ["a", "b"],
            "$defs": {"K": {"enum": ["outer"]}},
        },
        {"a": {"k": "inner"}, "b": "outer"}, {"a": {"k": "outer"}, "b": "outer"},
    ),
    "names and data that look like references": (
        {
            "properties": {
                "$ref": {"enum": ["#/x"]}, "$id": {"const": {"$ref": "#", "$id": "y"}}
            },
            "required": ["$ref", "$id"],
            "type": "object",
        },
        {"$ref": "#/x", "$id": {"$ref": "#", "$id": "y"}}, {"$ref": "#", "$id": {}},
    ),
    "another document of that id": (
        {"$id": ID, "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"],
         "$defs": {"N": {"type": "integer"}}},
        {"n": 5}, {"n": "x"},
    ),
    "anything": (True, {"n": [5]}, {"n": [5]}),
}  # fmt: skip


def written(name, arguments):
    return json.dumps({"name": name, "arguments": arguments})


@pytest.mark.parametrize("choice", ["required", "f5"])
def test_a_reference_means_the_same_inside_the_schema_of_a_call(model, choice):
    schemas = [schema for schema, _, _ in DOCUMENTS.values()]
    tools = Tools([tool(it, f"f{n}") for n, it in enumerate(schemas)], choice)
    for n, (what, (schema, right, wrong)) in enumerate(DOCUMENTS.items()):
        may_call = choice in ("required", f"f{n}")
        assert allowed(model, tools, written(f"f{n}", right)) is may_call, what
        if schema is not True:
            assert not allowed(model, tools, written(f"f{n}", wrong)), what


@cases(
    "schema, words",
    ({"$ref": "#/properties/name"}, "'f': .*'/properties/name' does not exist"),
    ({"$ref": "https://example.com/other"}, "'f': .*example.com/other"),
    ({"allOf": 5, "$ref": "#"}, "'f': .*allOf must be an array"),
    ({"$dynamicRef": "#a"}, "'f': .*dynamicRef"),
)
def test_a_reference_to_what_is_not_there_is_refused_by_name(model, schema, words):
    with pytest.raises(OptionError, match=words):
        model.chat([user_message("a")], tools=Tools([tool(schema)]))


def test_numbers_that_would_be_rounded_are_refused():
    schema = {"properties": {"n": {"enum": [1, [2**53 + 1]]}}}
    for functions, more in (([tool(schema)], {}), ([F], {"schema": schema})):
        with pytest.raises(OptionError, match="9007199254740993 cannot be kept"):
            Tools(functions, **more)


@cases(
    "schema",
    {"properties": {"const": {"title": 2**53 + 1}}},
    {"default": {"maximum": 2**53 + 1}},
    {"examples": [{"const": 2**53 + 1}]},
    {"dependencies": {"const": {"title": 2**53 + 1}}},
)
def test_numbers_that_limit_nothing_may_be_large(schema):
    Tools([tool(schema)])


@cases("source", '{"const":9007199254740993}', '{"type":"integer","maximum":1e19}')
def test_numbers_of_schemas_in_grammars_are_kept_or_refused(source):
    with pytest.raises(OptionError, match="cannot be kept exactly"):
        Constraint("grammar", f"start: %json {source}")
    with pytest.raises(OptionError, match="cannot be kept exactly"):
        Constraint("JSON schema", source)


def test_a_call_with_equal_keys_or_deep_arrays_is_a_call():
    deep = "[" * 70 + "]" * 70
    for arguments in ('{"a": 1, "a": 2}', f'{{"a": {deep}}}'):
        [call] = Tools([F], "f", format=HERMES).calls(
            f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        )
        assert call.name == "f"


WEATHER_PARAMETERS = record(
    city={"type": "string"},
    days={"type": "integer", "minimum": 1},
    dry={"type": "boolean"},
    unit={"enum": ["C", "F"]},
    at={"type": "array", "items": {"type": "string"}},
)
WEATHER_PARAMETERS["required"] = ["city", "dry"]
WEATHER = tool(WEATHER_PARAMETERS, "get.weather")
ARGUMENTS = {"city": 'New "York"', "dry": True, "unit": "C", "at": ["a, b"]}
JSON = json.dumps(ARGUMENTS)
PYTHON = 'get.weather(city="New \\"York\\"", dry=True, unit="C", at=["a, b"])'
OBJECT = f'{{"name": "get.weather", "arguments": {JSON}}}'
PUBLISHED = {
    "Qwen3-Coder": (
        "reply with <tool_call>\n<function=name>\n<parameter=a>\n1\n</parameter>",
        '<tool_call>\n<function=get.weather>\n<parameter=city>\nNew "York"\n'
        "</parameter>\n<parameter=dry>\ntrue\n</parameter>\n<parameter=unit>\nC\n"
        '</parameter>\n<parameter=at>\n["a, b"]\n</parameter>\n</function>\n'
        "</tool_call>",
    ),
    "Qwen3": ("within <tool_call></tool_call>", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "Nemotron": ("<TOOLCALL>[{...}]</TOOLCALL>", f"<TOOLCALL>[{OBJECT}]</TOOLCALL>"),
    "Mistral Nemo": ("{{- '[TOOL_CALLS][' }}", f"[TOOL_CALLS][{OBJECT}]"),
    "Devstral": (
        "'[TOOL_CALLS]' + name + '[ARGS]'",
        f"[TOOL_CALLS]get.weather[ARGS]{JSON}",
    ),
    "gpt-oss": (
        "to=functions.' + name + '<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.get.weather <|constrain|>json<|message|>"
        + JSON,
    ),
    "Gemma 4": (
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        '<|tool_call>call:get.weather{city:<|"|>New "York"<|"|>,dry:true,'
        'unit:<|"|>C<|"|>,at:[<|"|>a, b<|"|>]}<tool_call|>',
    ),
    "LFM2": (
        "List of tools: <|tool_list_start|>[",
        f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    ),
    "LFM2.5": (
        '{{- "<|tool_call_start|>[" }}',
        f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    ),
    "Llama 4": ("[func_name1(params_name1=params_value1), f2(params)]", f"[{PYTHON}]"),
    "Llama 3.2": (
        'in the format {"name": function name, "parameters": dictionary of argument',
        OBJECT.replace('"arguments"', '"parameters"'),
    ),
    "another": ("{{ messages }}", OBJECT),
}
published = pytest.mark.parametrize("name", PUBLISHED)


@published
def test_a_call_in_a_published_format_is_written_and_read(model, name):
    template, text = PUBLISHED[name]
    form = CallFormat.of(template)
    tools = Tools([F, WEATHER], format=form)
    for choice in ("auto", "required", "get.weather"):
        tools = Tools([F, WEATHER], choice, form)
        assert allowed(model, tools, form.turn + text), choice
        assert allowed(model, tools, f"{form.lead}Hello") == (choice == "auto")
    [call], said = tools.read(text)
    assert (call.name, call.arguments, said) == ("get.weather", ARGUMENTS, "")
    assert not allowed(model, Tools([F, WEATHER], "f", form), form.turn + text)
    dry = r', dry=True|,dry:true| "dry": true,|<parameter=dry>\ntrue\n</parameter>\n'
    wrong = re.sub(dry, "", text)
    assert wrong != text
    assert not allowed(model, tools, form.turn + wrong), "dry is required"


@published
def test_a_call_that_is_broken_is_text(name):
    template, text = PUBLISHED[name]
    form = CallFormat.of(template)
    tools = Tools([WEATHER], format=form)
    for end in range(len(text) - len(form.end.strip()) - 1):
        assert tools.read(text[:end]) == ([], text[:end])
        assert tools.shown(text[:end]) <= len(form.begin)
    unknown = text.replace("get.weather", "get_weather")
    assert tools.read(unknown) == ([], unknown)
    if form.begin:
        said = f"I call.\n{text}\n{text[:-20]}"
        calls, rest = tools.read(said)
        assert [call.arguments for call in calls] == [ARGUMENTS]
        assert rest == f"I call.\n\n{text[:-20]}"
        assert said[: tools.shown(said)] == "I call."


@published
def test_several_calls_are_read(model, name):
    template, text = PUBLISHED[name]
    form = CallFormat.of(template)
    one = OBJECT if OBJECT in text else PYTHON
    many = text.replace(one, f"{one}, {one}") if form.listed else f"{text}\n{text}"
    if form.turn or not (form.begin or form.listed):
        return  # it has one call in a text
    calls = Tools([WEATHER], format=form).calls(many)
    assert [call.arguments for call in calls] == [ARGUMENTS] * 2
    assert allowed(model, Tools([WEATHER], "required", form), many)
    assert not allowed(model, Tools([WEATHER], "required", form, parallel=False), many)


@cases(
    "text",
    *(f"[f({given})]" for given in ("1", "**{}", "x=y", "x={1, 2}", "x=1j", "x=b'a'")),
    *("[f", "f(x=1)", "[f()[f()]", "[,f()]"),
    f"[f(x={'-' * 9999}1)]",
    f"[f(x={'(' * 9999}1{')' * 9999})]",
)
def test_python_that_is_no_call_is_text(text):
    assert Tools([F], format=CallFormat.of("[func_name1(")).read(text) == ([], text)
    tools = Tools([F], format=CallFormat.of("[func_name1("))
    [call] = tools.calls('[f(x=[-1, null, true], from={"a": "😀 \\/"}, a-b=True)]')
    values = {"from": {"a": "😀 /"}, "a-b": True}
    assert call.arguments == {"x": [-1, None, True], **values}
    hermes = '<tool_call>{"name": [], "arguments": 1}'
    assert Tools([F], format=HERMES).read(hermes) == ([], hermes)
