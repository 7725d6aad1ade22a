import contextlib
import io
import json
import re
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI
from tokenizers import AddedToken

from jetdraft import Conversation, OptionError, Options, Pool, Tools, load
from jetdraft.runtime.text.template import user_message
from jetdraft.server.app import Service
from tests import cases
from tests.runtime.test_conversation import with_template
from tests.runtime.text.test_tools import record, tool
from tests.server import test_dialects as dialects
from tests.server.serving import served

DOCS = Path(__file__).parents[2] / "docs" / "embedding.md"
SENSORS = ["battery", "speed", "light"]
PARAMETERS = record(sensor={"type": "string", "enum": SENSORS})
TOOLS = Tools([tool(PARAMETERS, "read_sensor")])


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
    turn = {"role": "assistant", "content": "", "tool_calls": [call.for_template()]}
    assert talk.messages[-1] == turn
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


@cases(
    "results, fact",
    ([], "has 1 calls, not"),
    (["1", "2"], "has 1 calls, not"),
    ([{1, 2}], "'read_sensor' is not JSON"),
)
def test_each_call_needs_its_result_in_json(talk, results, fact):
    list(talk.say("Tell me the speed."))
    with pytest.raises(OptionError, match=fact):
        talk.answer(*results)
    talk.reset()
    with pytest.raises(OptionError, match="has 0 calls, not 1"):
        talk.answer("1")


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
    ask, hello = [user_message("Tell me the speed.")], [user_message("Hello")]
    result = toy_model.chat(ask, tools=TOOLS, max_new_tokens=64)
    assert [call.arguments for call in result.calls] == [{"sensor": "speed"}]
    options = Options.of(max_new_tokens=64)
    assert toy_model.chat(ask, options, tools=TOOLS).calls
    assert toy_model.chat(hello, options, tools=TOOLS).calls == []
    must = Tools(TOOLS.functions, "read_sensor")
    [call] = toy_model.chat(hello, options, tools=must).calls
    assert call.arguments["sensor"] in SENSORS


def test_a_refused_schema_is_named(toy_model):
    tools = Tools([*TOOLS.functions, tool({"type": "strange"}, "odd")])
    with pytest.raises(OptionError, match="tool 'odd': "):
        toy_model.chat([user_message("Hello")], tools=tools)


def added(special, words):
    """Tokens for each of the words, which are special, or which are not."""
    return [AddedToken(word, special=special) for word in words.split()]


# Some of Qwen's.
SPECIAL, WORDS = "<|im_start|> <|im_end|>", "<tool_call> </tool_call> <|fim_prefix|>"
TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}
<tool_call></tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CLOCK_PARAMETERS = record(
    side={"enum": ["left", "right", "<think>"]},
    pair={"type": "array", "items": {"$ref": "#/$defs/N"}, "maxItems": 2},
) | {"$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 99}}}
FUNCTIONS = [tool(CLOCK_PARAMETERS, name) for name in ("look", "turn")]
MESSAGES = [user_message("Hi")]
WAYS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}]
DRAFTS = [
    {"method": "lookup", "num_draft_tokens": 3},
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "auto"},
]


@pytest.fixture(scope="module", params=["Qwen", "special"])
def pool(bundle, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("token-tools") / "bundle"
    own = added(request.param == "special", f"{WORDS} <think>")
    with_template(bundle, folder, TEMPLATE, [*added(True, SPECIAL), *own])
    with Pool(folder, 1, threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def model(pool):
    return pool.models[0].twin()


@pytest.fixture(scope="module")
def client(pool):
    with served(Service(pool, "m")) as address:
        url = f"{address}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


def biased(model, choice):
    [begin] = model.parts.text.encode("<tool_call>", add_special=False)
    bias = {"logit_bias": {begin: 1000.0}} if choice == "auto" else {}
    return {"max_new_tokens": 100, **bias}


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("choice", ["auto", "required", "turn"])
def test_calls_are_written_by_their_tokens(model, choice, way):
    tools = Tools(FUNCTIONS, choice, parallel=False)
    options = {**way, **biased(model, choice)}
    plain = model.chat(MESSAGES, tools=tools, method="none", **options)
    [call] = plain.calls
    assert plain.finish_reason == "stop"
    assert call.name in (["turn"] if choice == "turn" else ["look", "turn"])
    assert call.arguments["side"] in CLOCK_PARAMETERS["properties"]["side"]["enum"]
    assert plain.text.startswith("<tool_call>")
    assert plain.text.endswith("</tool_call>")
    tags = [model.parts.text.encode(tag)[0] for tag in ("<tool_call>", "</tool_call>")]
    assert [plain.token_ids[0], plain.token_ids[-2]] == tags
    assert set(tags).isdisjoint(plain.token_ids[1:-2])
    for draft in DRAFTS:
        drafted = model.chat(MESSAGES, tools=tools, **draft, **options)
        assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
        assert [c.arguments for c in drafted.calls] == [call.arguments]
        assert drafted.stats.drafted_tokens
        fitted = model.fitted(tools)
        ids = model.chat_prompt(MESSAGES, tools=tools.functions)
        with model.stream_reply(ids, tools=fitted, **draft, **options) as stream:
            assert "".join(piece.text for piece in stream) == plain.text


def test_several_calls_and_their_results(model):
    ends = dict.fromkeys(model.bundle.eos_token_ids, -1000.0)
    tools, options = Tools(FUNCTIONS, "required"), {"temperature": 1.0, "seed": 2}
    options |= {"method": "none", "logit_bias": ends}
    talk = Conversation(model, tools=tools, max_new_tokens=200, **options)
    texts = list(accumulate(piece.text for piece in talk.say("Hi")))
    text = talk.last.text
    whole = text[: text.rindex("</tool_call>") + len("</tool_call>")]
    calls = talk.tools.calls(whole)
    assert len(calls) == whole.count("<tool_call>") > 1
    talk.reset()
    count = 1 + [text.count("</tool_call>") for text in texts].index(2)
    list(talk.say("Hi", max_new_tokens=count))
    two = talk.calls
    assert [(call.name, call.arguments) for call in two] == [
        (call.name, call.arguments) for call in calls[:2]
    ]
    list(talk.answer("5", "6", max_new_tokens=2))
    results = [(m["tool_call_id"], m["content"]) for m in talk.messages[2:-1]]
    assert results == [(two[0].id, "5"), (two[1].id, "6")]


def test_a_text_without_a_call_may_have_other_tokens(model, request):
    """A thinking model begins with a token that is no part of any call."""
    name = "<|fim_prefix|>"
    token, end = model.parts.text.encode(f"{name}<|im_end|>", add_special=False)
    options = {"logit_bias": {token: 500.0, end: 600.0}, "max_new_tokens": 4}
    result = model.chat(MESSAGES, tools=Tools(FUNCTIONS), **options)
    assert (result.text, result.calls) == ("", [])
    del options["logit_bias"][end]
    result = model.chat(MESSAGES, tools=Tools(FUNCTIONS), **options)
    # A special token would be hidden in a text without a constraint.
    may_come = "special" not in request.node.name
    assert (result.token_ids == [token] * 4) is may_come
    assert (name in result.text) is may_come


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_server_gives_the_same_calls(client, model, way):
    draft = DRAFTS[1]
    for choice in ("auto", "required", "turn"):
        options = biased(model, choice)
        asked = {"model": "m", "messages": MESSAGES, "tools": FUNCTIONS, **way}
        asked |= {"parallel_tool_calls": False, "extra_body": draft}
        asked |= {"max_tokens": options.pop("max_new_tokens"), **options}
        tools = Tools(FUNCTIONS, choice, parallel=False)
        expected = model.chat(MESSAGES, tools=tools, **way, **biased(model, choice))
        named = {"type": "function", "function": {"name": choice}}
        asked["tool_choice"] = named if choice == "turn" else choice
        found = client.chat.completions.create(**asked).choices[0]
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        assert of(found.message.tool_calls) == [
            (call.name, call.arguments) for call in expected.calls
        ]
        chunks = list(client.chat.completions.create(**asked, stream=True))
        parts = [c for each in chunks for c in each.choices[0].delta.tool_calls or []]
        [name] = {part.function.name for part in parts} - {None}
        arguments = "".join(part.function.arguments for part in parts)
        assert [(name, json.loads(arguments))] == of(found.message.tool_calls)
        assert "".join(each.choices[0].delta.content or "" for each in chunks) == ""


def of(calls):
    return [(c.function.name, json.loads(c.function.arguments)) for c in calls]


THINKING = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and keep %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
{%- elif opens %}{{ '<think>\n' }}{% endif %}"""
HARMONY = """\
{% for message in messages %}<|start|>{{ message.role }}<|message|>
{{- message.content }}<|end|>{% endfor %}<|start|>assistant
{#- <|channel|>analysis<|message|> <|channel|>commentary to=functions. #}"""
OF_HARMONY = "<|start|> <|return|> <|channel|> <|message|> <|end|> <|constrain|>"
THINKERS = {
    "tags": (THINKING, [*added(True, SPECIAL), *added(False, "<think> </think>")]),
    "harmony": (HARMONY, added(True, OF_HARMONY)),
}
SCHEMA = record(side={"enum": ["left", "right"]}, n={"const": 7})


@pytest.fixture(scope="module")
def thinkers(bundle, tmp_path_factory):
    models = {}
    for name, (source, tokens) in THINKERS.items():
        folder = tmp_path_factory.mktemp(name) / "bundle"
        models[name] = load(with_template(bundle, folder, source, tokens), threads=1)
    return models


def biases(model, **wanted):
    ids = {name: model.encode(f"<{name}>")[0] for name in wanted}
    ends = dict.fromkeys(model.bundle.eos_token_ids, -1000.0)
    return {"logit_bias": {**ends, **{ids[name]: b for name, b in wanted.items()}}}


def same_with_drafts(model, ask, **options):
    plain = model.chat(ask, method="none", **options)
    for draft in DRAFTS:
        drafted = model.chat(ask, **draft, **options)
        assert drafted.stats.drafted_tokens or draft["method"] == "auto"
        for field in ("token_ids", "thought", "text", "finish_reason", "texts"):
            assert getattr(drafted, field) == getattr(plain, field), (draft, field)
    return plain


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("most", [0, 12])
def test_a_thought_ends_in_time(thinkers, way, most):
    model, template = thinkers["tags"], {"opens": True}
    how = {"template": template, "max_new_tokens": 40, **way}
    how |= biases(model, think=-1000.0, **{"/think": -1000.0})
    result = same_with_drafts(model, MESSAGES, max_thinking_tokens=most, **how)
    closing = model.encode("\n</think>\n\n")
    end = most + len(closing)
    assert result.token_ids[most:end] == closing
    prompt = model.chat_prompt(MESSAGES, **template)
    stream = model.parts.text.stream(prompt)
    assert result.thought == stream.push(result.token_ids[: most + 1]).strip()
    stream.push(closing)
    text = stream.push(result.token_ids[end:]) + stream.rest()
    assert result.text == text.lstrip()
    before_tag = closing.index(model.encode("</think>")[0])
    assert result.stats.thought_tokens == most + before_tag + 1
    del how["template"]
    raw = model.generate(token_ids=prompt, max_thinking_tokens=most, **how)
    assert (raw.thought, len(raw.token_ids)) == ("", 40), "no reply of a chat"


@pytest.mark.parametrize("way", WAYS, ids=str)
@cases(
    "template, think, end, has_thought",
    ({"opens": True}, 0.0, -1000.0, True),
    ({"opens": True}, 0.0, 60.0, True),
    ({}, 1000.0, 0.0, True),
    ({}, -1000.0, 0.0, False),
    ({"enable_thinking": False}, -1000.0, 0.0, False),
)
def test_structured_output_begins_after_the_thought(
    thinkers, way, template, think, end, has_thought
):
    model = thinkers["tags"]
    how = {**way, **biases(model, think=think, **{"/think": end})}
    how["logit_bias"] |= dict.fromkeys(model.bundle.eos_token_ids, 50.0)
    how |= {"json_schema": SCHEMA, "max_new_tokens": 90, "max_thinking_tokens": 9}
    result = same_with_drafts(model, MESSAGES, template=template, **how)
    assert json.loads(result.text)["n"] == 7
    assert result.finish_reason == "stop"
    assert bool(result.stats.thought_tokens) is has_thought
    ids = model.chat_prompt(MESSAGES, **template)
    with model.stream_reply(ids, **DRAFTS[0], **how) as stream:
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == result.text
    assert "".join(piece.thought for piece in pieces) == result.thought


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("choice", ["auto", "required", "turn", None])
def test_harmony_thinks_then_calls_or_answers(thinkers, way, choice):
    model = thinkers["harmony"]
    tools = choice and Tools(FUNCTIONS, choice)
    how = {"max_thinking_tokens": 8, "max_new_tokens": 160, **way, **biases(model)}
    del how["logit_bias"]
    schema = {} if tools else {"json_schema": SCHEMA}
    result = same_with_drafts(model, MESSAGES, tools=tools, **schema, **how)
    begin = model.encode("<|channel|>analysis<|message|>")
    assert result.token_ids[: len(begin)] == begin
    assert result.stats.thought_tokens == 9
    assert not any(f"<|{name}|>" in result.thought for name in ("message", "end"))
    if tools is None:
        assert json.loads(result.text)["n"] == 7
    elif choice != "auto":
        [call] = result.calls
        assert call.arguments["side"] in CLOCK_PARAMETERS["properties"]["side"]["enum"]


def test_the_template_decides_what_becomes_of_a_thought(thinkers):
    model = thinkers["tags"]
    how = {"max_thinking_tokens": 6, "max_new_tokens": 20, **biases(model)}
    reused = {}
    for keep in (True, False):
        template = {"opens": True, "keep": keep}
        talk = Conversation(model, template=template, **how)
        list(talk.say("Hi"))
        message = talk.messages[-1]
        assert message["reasoning_content"] == talk.last.thought
        assert message["content"] == talk.last.text
        list(talk.say("And?"))
        reused[keep] = talk.last.stats.reused_tokens
        prompt = model.decode(model.chat_prompt(talk.messages, **template))
        assert (message["reasoning_content"] in prompt) == keep
    assert reused[True] > reused[False] > 0


def heard(path, answer, stream):
    """The thought and the text of an answer, or of a stream's events."""
    events, name = dialects.events_of(answer) if stream else [answer.json()], "text"
    thought = "thinking"
    if path == dialects.MESSAGES:
        parts = events[0].get("content", [e.get("delta", {}) for e in events])
        assert not stream or {"thinking_delta", "text_delta"} < {
            part.get("type") for part in parts
        }
    elif path == dialects.CHAT:
        parts, name = [event["message"] for event in events], "content"
    else:
        items = events[-1].get("response", events[-1])["output"]
        assert [item["type"] for item in items] == ["reasoning", "message"]
        parts = [{p["type"]: p["text"]} for item in items for p in item["content"]]
        if stream:
            deltas = [event for event in events if "delta" in event]
            parts = [{e["type"].split(".")[1]: e["delta"]} for e in deltas]
        thought, name = "reasoning_text", "output_text"
    return ["".join(part.get(kind, "") for part in parts) for kind in (thought, name)]


def test_the_server_sends_thoughts_apart(thinkers):
    model = thinkers["tags"]
    bias = dict.fromkeys(model.bundle.eos_token_ids, -100.0)
    how = {"max_tokens": 60, "temperature": 0, "messages": MESSAGES, "model": "m"}
    how["logit_bias"] = {str(token): value for token, value in bias.items()}
    most = {"max_thinking_tokens": 8}
    opened = {"extra_body": {**most, "chat_template_kwargs": {"opens": True}}}
    own = model.chat(
        MESSAGES, template={"opens": True}, max_new_tokens=60, logit_bias=bias, **most
    )
    with (
        Pool(model.bundle.path, 1, threads=1) as pool,
        served(Service(pool, "m")) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        whole = create(**how, **opened, n=2)
        for message in (choice.message for choice in whole.choices):
            assert message.reasoning_content == own.thought
            assert message.content == own.text
        spent = whole.usage.completion_tokens_details.reasoning_tokens
        assert spent == 2 * own.stats.thought_tokens > 16
        said = [["", ""], ["", ""]]
        for chunk in create(**how, **opened, n=2, stream=True):
            [choice] = chunk.choices
            said[choice.index][0] += getattr(choice.delta, "reasoning_content", "")
            said[choice.index][1] += choice.delta.content or ""
        assert said == [[own.thought, own.text]] * 2
        budget = {"thinking": {"type": "enabled", "budget_tokens": 8}}
        opened["extra_body"] |= {"max_thinking_tokens": None, **budget}
        assert create(**how, **opened).choices[0].message.content == own.text
        same = {"model": "m", "logit_bias": how["logit_bias"]}
        same["chat_template_kwargs"] = {"opens": True}
        for path, stream in product(dialects.ASKED, (False, True)):
            own_budget = budget if path == dialects.MESSAGES else most
            body = dialects.body_of(path, MESSAGES, stream, **same, **own_budget)
            answer = dialects.post(address, path, body)
            assert heard(path, answer, stream) == [own.thought, own.text], answer.text
        off = {"enable_thinking": False}, {"thinking": {"type": "disabled"}}
        for body in ({"reasoning_effort": "none"}, *off):
            plain = create(**how, extra_body=body)
            assert plain.usage.prompt_tokens > whole.usage.prompt_tokens
            assert not hasattr(plain.choices[0].message, "reasoning_content")
        with pytest.raises(BadRequestError, match="must be an object"):
            create(**how, extra_body={"chat_template_kwargs": 5})
