"""Conversations and chats whose model calls tools."""

import contextlib
import io
import re
from itertools import pairwise
from pathlib import Path

import pytest

from jetdraft import Conversation, Options, Tools
from jetdraft.errors import OptionError
from jetdraft.runtime.text.template import user_message

DOCS = Path(__file__).parents[2] / "docs" / "embedding.md"
SENSORS = ["battery", "speed", "light"]
PARAMETERS = {
    "type": "object",
    "properties": {"sensor": {"type": "string", "enum": SENSORS}},
    "required": ["sensor"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read_sensor", "parameters": PARAMETERS}
TOOLS = Tools([{"type": "function", "function": FUNCTION}])


@pytest.fixture
def talk(toy_model):
    return Conversation(toy_model, tools=TOOLS, max_new_tokens=64)


def test_the_example_in_the_documents_does_what_it_says():
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    [example] = [block for block in blocks if "jetdraft.Tools" in block]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert f"# {printed.getvalue()}" in example
    assert printed.getvalue() == "user assistant tool assistant\n"


def test_calls_come_back_parsed_and_results_go_on(talk):
    text = "".join(piece.text for piece in talk.say("Tell me the speed."))
    [call] = talk.calls
    assert (call.name, call.arguments) == ("read_sensor", {"sensor": "speed"})
    assert talk.last.text == text
    assert talk.messages[-1] == {
        "role": "assistant", "content": "", "tool_calls": [call.for_template()],
    }  # fmt: skip
    list(talk.answer('{"speed": 33}'))
    assert talk.calls == []
    assert re.fullmatch(r"The speed is \d+ meters per second\.", talk.last.text)
    assert talk.messages[-2]["tool_call_id"] == call.id
    assert talk.messages[-2]["content"] == '{"speed": 33}'
    assert talk.last.stats.reused_tokens > 0
    list(talk.say("Hello"))
    assert talk.last.text == "Hello, I am a toy robot."


def test_what_it_wrote_and_was_told_is_kept_in_a_file(talk, toy_model, tmp_path):
    list(talk.say("Tell me the speed."))
    list(talk.answer({"speed": 33}))
    talk.save(tmp_path / "talk.json")
    other = Conversation(toy_model, tools=TOOLS, max_new_tokens=64)
    other.load(tmp_path / "talk.json")
    assert (other.messages, other.calls) == (talk.messages, [])


@pytest.mark.parametrize("results", [(), ("1", "2")])
def test_each_call_needs_its_result(talk, results):
    list(talk.say("Tell me the speed."))
    with pytest.raises(OptionError, match="has 1 calls, not"):
        talk.answer(*results)
    talk.reset()
    with pytest.raises(OptionError, match="has 0 calls, not 1"):
        talk.answer("1")


def test_a_result_must_be_json(talk):
    list(talk.say("Tell me the speed."))
    with pytest.raises(OptionError, match="'read_sensor' is not JSON"):
        talk.answer({1, 2})


def test_full_buffers_lose_a_turn_with_its_calls(toy_model):
    talk = Conversation(toy_model, tools=TOOLS, drop_oldest=True, max_new_tokens=64)
    for _ in range(12):
        list(talk.say("Tell me the speed."))
        if talk.calls:
            list(talk.answer({"speed": 33}))
        roles = [message["role"] for message in talk.messages]
        assert roles[0] == "user"
        for before, role in pairwise(roles):
            assert before != role
            assert role != "tool" or before == "assistant"
    assert roles.count("user") < 12
    assert "tool" in roles


def test_a_chat_has_calls_too(toy_model):
    ask = [user_message("Tell me the speed.")]
    result = toy_model.chat(ask, tools=TOOLS, max_new_tokens=64)
    assert [call.arguments for call in result.calls] == [{"sensor": "speed"}]
    options = Options.of(max_new_tokens=64)
    assert toy_model.chat(ask, options, tools=TOOLS).calls
    assert toy_model.chat([user_message("Hello")], options, tools=TOOLS).calls == []


def test_a_tool_that_must_be_called_is_called(toy_model):
    must = Tools(TOOLS.functions, "read_sensor")
    [call] = toy_model.chat(
        [user_message("Hello")], tools=must, max_new_tokens=64
    ).calls
    assert call.arguments["sensor"] in SENSORS


def test_a_refused_schema_is_named(toy_model):
    function = {"name": "odd", "parameters": {"type": "strange"}}
    tools = Tools([*TOOLS.functions, {"type": "function", "function": function}])
    with pytest.raises(OptionError, match="tool 'odd': "):
        toy_model.chat([user_message("Hello")], tools=tools)
