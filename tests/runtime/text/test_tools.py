"""What may be written where there are tools, and what of it is a call."""

from __future__ import annotations

import json

import pytest

import jetdraft
from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.runtime.text.tools import Tools
from jetdraft.testing import toy_bundle

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {
    "type": "function",
    "function": {"name": "g", "parameters": {"const": {"mark": "</tool_call>"}}},
}
CALL = '{"name": "f", "arguments": {}}'
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
OTHER = '<tool_call>{"name": "g", "arguments": {"mark": "</tool_call>"}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return jetdraft.load(toy_bundle(tmp_path_factory.mktemp("tools")), threads=1)


def allowed(model, tools, text):
    """Whether a whole text may be written."""
    matcher = model.vocabulary.matcher(Constraint("grammar", tools.grammar()), 1)
    ids = model.parts.text.encode(text, special=False)
    rows = Rows.chain([0, *ids, model.bundle.eos_token_ids[0]])
    return len(matcher.allowed(rows, [0])) == len(rows)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, {"": True, "Hello": True, "<b>": True, CALL: True, "{": False}),
        ({"choice": "required"}, {CALL: True, "Hello": False, "": False}),
        (
            {"marked": True},
            {
                "": True, "Hello": True, "<think> {": True, CALL: True, MARKED: True,
                f"I call.\n{MARKED}": True, f"{MARKED}\n{OTHER}": True,
                "<tool_call>": False, "a <tool_call> b": False, MARKED[:-1]: False,
            },
        ),
        (
            {"marked": True, "choice": "f", "parallel": False},
            {MARKED: True, f"{MARKED}{MARKED}": False, "Hello": False, OTHER: False},
        ),
        ({"schema": {"const": 5}}, {"5": True, CALL: True, "Hello": False}),
        (
            {"schema": {"const": 5}, "marked": True},
            {"5": True, MARKED: True, f"Hi {MARKED}": False, "Hello": False},
        ),
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
        (True, f"{MARKED}\n<tool_call>{{", []),
    ],
)
def test_what_is_a_call(marked, text, names):
    calls = Tools([F, G], marked=marked).calls(text)
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
    assert text[: Tools([F], marked=marked).shown(text)] == shown


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    "parameters",
    [deep(5000), {"const": object()}, {"const": float("nan")}, {"\ud800": {}}],
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


def test_a_call_that_is_nested_too_deeply_is_none():
    text = '{"name": "f", "arguments": ' + "[" * 200_000
    assert Tools([F]).calls(text) == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "9" * 30])
def test_a_call_with_a_number_that_json_cannot_hold_is_none(number):
    text = '{"name": "f", "arguments": {"x": %s}}'
    assert len(Tools([F]).calls(text % 5)) == 1
    assert Tools([F]).calls(text % number) == []
