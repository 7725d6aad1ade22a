"""What may be written where there are tools, and what of it is a call."""

import json
from functools import reduce

import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.text.constraint import Constraint, Matcher
from jetdraft.runtime.text.tools import BEGIN_TAG, END_TAG, Tools

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {
    "type": "function",
    "function": {"name": "g", "parameters": {"const": {"mark": "</tool_call>"}}},
}
AS_TEXT = f'"{BEGIN_TAG}"', f'"{END_TAG}"'
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


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, {"": True, "Hello": True, "<b>": True, CALL: True, "{": False}),
        ({"choice": "required"}, {CALL: True, "Hello": False, "": False}),
        ({"tags": AS_TEXT},
         {"": True, "Hello": True, "<think> {": True, CALL: True, MARKED: True,
          f"I call.\n{MARKED}": True, f"{MARKED}\n{OTHER}": True,
          "<tool_call>": False, "a <tool_call> b": False, MARKED[:-1]: False}),
        ({"tags": AS_TEXT, "choice": "f"},
         {MARKED: True, f"{MARKED}{MARKED}": False, "Hello": False, OTHER: False}),
        ({"tags": AS_TEXT, "choice": "required"}, {f"{MARKED}{MARKED}": True}),
        ({"tags": AS_TEXT, "parallel": False}, {f"{MARKED}{MARKED}": False}),
        ({"schema": {"const": 5}}, {"5": True, CALL: True, "Hello": False}),
        ({"schema": {"const": 5}, "tags": AS_TEXT},
         {"5": True, MARKED: True, f"Hi {MARKED}": False, "Hello": False}),
    ],
)  # fmt: skip
def test_what_may_be_written(model, options, texts):
    tools = Tools([F, G], **options)
    assert {text: allowed(model, tools, text) for text in texts} == texts


@pytest.mark.parametrize(
    ("marked", "text", "names"),
    [
        (False, CALL, ["f"]),
        (False, f" {CALL}", []),
        (False, CALL[:-1], []),
        (False, '{"name": "h", "arguments": {}}', []),
        (False, '{"age": 5}', []),
        (True, CALL, []),
        (True, f"I call.\n{MARKED}\n{OTHER}", ["f", "g"]),
        (True, f"{MARKED}\n<tool_call>{{", ["f"]),
        (True, "<tool_call>{", []),
    ],
)
def test_what_is_a_call(marked, text, names):
    calls = Tools([F, G], tags=AS_TEXT if marked else ()).calls(text)
    assert [call.name for call in calls] == names
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(call.arguments, dict)
        assert json.loads(call.for_openai()["function"]["arguments"]) == call.arguments
        assert call.for_template()["function"]["arguments"] == call.arguments


@pytest.mark.parametrize(
    ("marked", "text", "shown"),
    [
        (False, "a {", "a {"),
        (False, "{ a", ""),
        (True, "{ a", "{ a"),
        (True, "a < b <tool", "a < b "),
        (True, "a <tool_call> b <tool", "a "),
    ],
)
def test_what_is_certainly_no_call(marked, text, shown):
    assert text[: Tools([F], tags=AS_TEXT if marked else ()).shown(text)] == shown


DEEP = reduce(lambda value, _: {"items": value}, range(5000), {})


@pytest.mark.parametrize(
    "parameters", [DEEP, {"const": object()}, {"const": float("nan")}, {"\ud800": {}}]
)
def test_tools_that_are_no_json_are_refused(parameters):
    function = {"name": "f", "parameters": parameters}
    with pytest.raises(OptionError, match="the tools are not JSON") as caught:
        Tools([{"type": "function", "function": function}])
    assert caught.value.field == "tools"


@pytest.mark.parametrize(
    ("functions", "choice"),
    [([], "auto"), ([{}], "auto"), ("f", "auto"), ([F], "h"), ([F], None), (None, "f")],
)
def test_tools_that_cannot_be_used_are_refused(functions, choice):
    with pytest.raises(OptionError):
        Tools(functions, choice)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**64), 10**30, 10**300])
def test_the_integers_of_a_call_are_those_that_were_written(number):
    text = f'{{"name": "f", "arguments": {{"x": {number}}}}}'
    [call] = Tools([F]).calls(text)
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
    """All tools at once: no document may change another."""
    schemas = [schema for schema, _, _ in DOCUMENTS.values()]
    tools = Tools(
        [
            {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
            for n, schema in enumerate(schemas)
        ],
        choice,
    )
    for n, (what, (schema, right, wrong)) in enumerate(DOCUMENTS.items()):
        may_call = choice in ("required", f"f{n}")
        assert allowed(model, tools, written(f"f{n}", right)) is may_call, what
        if schema is not True:
            assert not allowed(model, tools, written(f"f{n}", wrong)), what


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "#/properties/name"}, "'f': .*'/properties/name' does not exist"),
        ({"$ref": "https://example.com/other"}, "'f': .*example.com/other"),
        ({"allOf": 5, "$ref": "#"}, "'f': .*allOf must be an array"),
        ({"$dynamicRef": "#a"}, "'f': .*dynamicRef"),
    ],
)
def test_a_reference_to_what_is_not_there_is_refused_by_name(model, schema, words):
    function = {"name": "f", "parameters": schema}
    tools = Tools([{"type": "function", "function": function}])
    with pytest.raises(OptionError, match=words):
        model.chat([{"role": "user", "content": "a"}], tools=tools)


def test_numbers_that_would_be_rounded_are_refused():
    schema = {"properties": {"n": {"enum": [1, [2**53 + 1]]}}}
    with_number = {**F, "function": {"name": "f", "parameters": schema}}
    for functions, more in (([with_number], {}), ([F], {"schema": schema})):
        with pytest.raises(OptionError, match="9007199254740993 cannot be kept"):
            Tools(functions, **more)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"const": {"title": 2**53 + 1}}},
        {"default": {"maximum": 2**53 + 1}},
        {"examples": [{"const": 2**53 + 1}]},
        {"dependencies": {"const": {"title": 2**53 + 1}}},
    ],
)
def test_numbers_that_limit_nothing_may_be_large(schema):
    Tools([{**F, "function": {"name": "f", "parameters": schema}}])


@pytest.mark.parametrize(
    "source", ['{"const":9007199254740993}', '{"type":"integer","maximum":1e19}']
)
def test_numbers_of_schemas_in_grammars_are_kept_or_refused(source):
    with pytest.raises(OptionError, match="cannot be kept exactly"):
        Constraint("grammar", f"start: %json {source}")
    with pytest.raises(OptionError, match="cannot be kept exactly"):
        Constraint("JSON schema", source)


def test_a_call_with_equal_keys_or_deep_arrays_is_a_call():
    deep = "[" * 70 + "]" * 70
    for arguments in ('{"a": 1, "a": 2}', f'{{"a": {deep}}}'):
        [call] = Tools([F], "f", tags=AS_TEXT).calls(
            f'{BEGIN_TAG}{{"name": "f", "arguments": {arguments}}}{END_TAG}'
        )
        assert call.name == "f"
