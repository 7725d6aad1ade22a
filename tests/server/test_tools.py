"""What may be written where there are tools, and what of it is a call."""

from __future__ import annotations

import json

import pytest

from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.text.constraint import Constraint
from jetdraft.server.tools import Tools

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {
    "type": "function",
    "function": {"name": "g", "parameters": {"const": {"mark": "</tool_call>"}}},
}
CALL = '{"name": "f", "arguments": {}}'
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"
OTHER = '<tool_call>{"name": "g", "arguments": {"mark": "</tool_call>"}}</tool_call>'


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
    assert [call["function"]["name"] for call in calls] == names
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


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
