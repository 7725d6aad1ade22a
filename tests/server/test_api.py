import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from click.testing import CliRunner

from jetdraft import Logprob, Piece, Result, Stats
from jetdraft.cli import main
from jetdraft.runtime.text.call_grammar import HERMES, CallFormat
from jetdraft.runtime.text.codec import TextCodec
from jetdraft.server import generation_request
from jetdraft.server.generation_request import (
    IGNORED_FIELDS,
    UNSUPPORTED_FIELDS,
    GenerationRequest,
)
from jetdraft.server.reply import Reply
from tests import cases
from tests.runtime.text.test_tools import (
    ARGUMENTS,
    JSON,
    OBJECT,
    PUBLISHED,
    WEATHER,
    published,
    record,
    tool,
)

PROMPT = "The robot sees"
HELLO = [{"role": "user", "content": "Hello"}]
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "stop": ["."]},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "stop": ["."]},
    {"temperature": 0.8, "seed": 1, "logit_bias": {"65": -100}},
]
NO_FLAGS = {"presence_penalty", "logit_bias"}
"""Options of Python and the server that the command line has not."""
OURS = [{}, {"method": "none"}, {"method": "draft", "num_draft_tokens": 4}]
READ_SENSOR = tool(record(sensor={"enum": ["left", "right"]}), "read_sensor")
AGE = {"type": "integer", "minimum": 0, "maximum": 99}


def form_of(schema):
    named = {"name": "person", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.fixture
def complete(client):
    return partial(client.completions.create, model="toy", prompt=PROMPT)


@pytest.fixture
def chat(client):
    return partial(client.chat.completions.create, model="toy", messages=HELLO)


def options_of(way):
    biases = {int(token): bias for token, bias in way.get("logit_bias", {}).items()}
    return {**way, "logit_bias": biases} if biases else way


@pytest.mark.parametrize("ours", OURS, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_server_api_and_command_line_write_the_same(complete, model, toy, way, ours):
    options = {"method": "none", "max_new_tokens": 40, **options_of(way)}
    expected = model.generate(PROMPT, **options)
    ask = partial(complete, max_tokens=40, **way, extra_body=ours)
    found = ask()
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage.completion_tokens == len(expected.token_ids)
    chunks = list(ask(stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    if NO_FLAGS & way.keys():
        return
    given = ["generate", str(toy), "--raw", "-p", PROMPT, "-n", "40", "-t", "1"]
    for name, value in {**way, **ours}.items():
        given += [f"--{name.replace('_', '-')}", "." if name == "stop" else str(value)]
    assert CliRunner().invoke(main, given).stdout == f"{expected.text}\n"


def test_what_a_model_is(client):
    (card,) = client.models.list().data
    assert card.id == "toy"
    assert client.models.retrieve("toy").methods[:2] == ["none", "lookup"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")


def test_a_chat(chat, model):
    expected = model.chat(HELLO, max_new_tokens=60)
    found = chat(temperature=0)
    assert found.choices[0].message.content == expected.text == expected.text.strip()
    assert found.choices[0].finish_reason == "stop"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    again = chat(messages=parts, temperature=0)
    assert again.choices[0].message.content == expected.text
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    usage = {"include_usage": True}
    chunks = list(chat(temperature=0, stream=True, stream_options=usage))
    said = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(said) == expected.text
    assert len(said) > 3, "it comes in pieces"
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    details = found.usage.completion_tokens_details
    assert 0 <= details.accepted_prediction_tokens < found.usage.completion_tokens


def test_logprobs(chat, complete, model):
    expected = model.chat(HELLO, max_new_tokens=5, logprobs=2).logprobs
    answer = chat(temperature=0, max_tokens=5, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    assert [each.logprob for each in found] == [
        pytest.approx(each.logprob, abs=1e-5) for each in expected
    ]
    assert all(each.top_logprobs[0].token == each.token for each in found)
    plain = complete(temperature=0, max_tokens=5, logprobs=1).choices[0].logprobs
    assert len(plain.token_logprobs) == len(plain.tokens) == 5
    assert all(len(each) == 1 for each in plain.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
@cases("choice", "required", {"type": "function", "function": {"name": "read_sensor"}})
def test_a_tool_is_called(chat, choice, stream):
    ask = [{"role": "user", "content": "What is on the left?"}]
    how = {"tools": [READ_SENSOR], "tool_choice": choice, "seed": 1}
    found = chat(messages=ask, stream=stream, **how)
    if stream:
        chunks = list(found)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        parts = [c for e in chunks for c in e.choices[0].delta.tool_calls or []]
        assert {part.index for part in parts} == {0}
        assert parts[0].id
        assert parts[0].type == "function"
        name = parts[0].function.name
        arguments = "".join(part.function.arguments for part in parts)
    else:
        assert found.choices[0].finish_reason == "tool_calls"
        (call,) = found.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "read_sensor"
    jsonschema.validate(json.loads(arguments), READ_SENSOR["function"]["parameters"])


def test_tools_may_be_left_alone_and_answered(chat):
    asked = {"tools": [READ_SENSOR], "temperature": 1.0}
    question = [{"role": "user", "content": "What is the temperature?"}]
    for seed in range(10):
        found = chat(**asked, seed=seed)
        assert found.choices[0].finish_reason == "stop"
        assert "<tool_call>" not in found.choices[0].message.content
        found = chat(**asked, messages=question, seed=seed)
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.content is None
    never = chat(**asked, tool_choice="none")
    assert never.choices[0].message.tool_calls is None
    named = {"name": "read_sensor", "arguments": '{"sensor": "left"}'}
    call = {"id": "call_1", "type": "function", "function": named}
    dialogue = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert chat(**asked, messages=dialogue, seed=1).choices


def test_tools_beside_a_response_format(chat):
    schema = record(name={"enum": ["Ann", "Max"]}, age=AGE)
    asked = {"tools": [READ_SENSOR], "temperature": 0, **form_of(schema)}
    prompts = {"stop": "Give me Ann as JSON.", "tool_calls": "What is the temperature?"}
    for reason, prompt in prompts.items():
        messages = [{"role": "user", "content": prompt}]
        choice = chat(**asked, messages=messages).choices[0]
        assert choice.finish_reason == reason
        if reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_logprobs_and_drafts_come_beside_tools_too(chat):
    how = {"tools": [READ_SENSOR], "seed": 3, "max_tokens": 30}
    ours = {"include_drafted": True}
    chunks = list(chat(**how, logprobs=True, stream=True, extra_body=ours))
    choices = [chunk.choices[0] for chunk in chunks]
    tokens = [each for c in choices for each in getattr(c, "tokens", None) or []]
    entries = [each for c in choices if c.logprobs for each in c.logprobs.content]
    assert len(tokens) == len(entries) > 0


def test_json_of_a_schema(chat, model):
    schema, way = record(age=AGE), {"temperature": 0.9, "seed": 2}
    found = chat(**way, **form_of(schema)).choices[0].message.content
    jsonschema.validate(json.loads(found), schema)
    expected = model.chat(HELLO, **way, json_schema=schema, max_new_tokens=400)
    assert found == expected.text
    form = {"response_format": {"type": "json_object"}}
    any_object = chat(temperature=0, max_tokens=200, **form).choices[0]
    assert any_object.message.content.startswith("{")


def test_which_tokens_had_been_drafted(complete, model):
    draft = {"method": "draft", "num_draft_tokens": 4}
    ours = {"include_drafted": True, **draft}
    expected = model.generate(PROMPT, **draft, max_new_tokens=30)
    ask = partial(complete, temperature=0, max_tokens=30, extra_body=ours)
    whole = ask().choices[0]
    assert [each["drafted"] for each in whole.tokens] == expected.from_draft
    assert "".join(each["text"] for each in whole.tokens) == expected.text
    chunks = ask(stream=True)
    tokens = [e for chunk in chunks for e in getattr(chunk.choices[0], "tokens", [])]
    assert tokens == whole.tokens
    assert any(expected.from_draft)
    assert not all(expected.from_draft)


def test_health_and_metrics(address, complete):
    before = figures(address)
    complete(max_tokens=25, temperature=0, extra_body={"method": "none"})
    after = figures(address)
    asked = 'jetdraft_requests_total{path="/v1/completions",status="200"}'
    assert after[asked] == before.get(asked, 0) + 1
    for name, more in (("new_tokens", 25), ("target_passes", 25), ("prompt_tokens", 5)):
        counter = f"jetdraft_{name}_total"
        assert after[counter] == before[counter] + more
    assert after["jetdraft_tokens_per_pass"] > 0
    found = httpx.get(f"{address}/health").json()
    assert found == {"status": "ok", "generating": 0, "waiting": 0}


def figures(address):
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def test_the_names_of_tokens_join_to_the_text(chat):
    how = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "logprobs": True}
    ours = {"regex": "[é😀]{9}"}
    whole = chat(**how, top_logprobs=5, extra_body=ours).choices[0]
    content = whole.logprobs.content
    data = b"".join(bytes(each.bytes) for each in content)
    assert data.decode(errors="replace") == whole.message.content
    assert {"bytes:\\xc3"} & {each.token for each in content}
    for each in content:
        tops = [(top.token, top.bytes) for top in each.top_logprobs]
        assert len(tops) == len({name for name, _ in tops}) == 5


def test_two_best_tokens_with_one_text_stay_two():
    entry = Logprob(1, -0.1, ((1, -0.1), (2, -3.0)), {1: b"a", 2: b"a"})
    request = GenerationRequest.of({"prompt": "x", "logprobs": 2}, False, 9)
    reply = Reply(request, "toy", TextCodec(None), "fp")
    stats = Stats("none", True, 1)
    result = Result("a", [1], 1, "stop", stats, [False], [entry], texts=["a"])
    (tops,) = reply.complete([result])["choices"][0]["logprobs"]["top_logprobs"]
    assert tops == {"a": -0.1, "token_id:2": -3.0}


def test_several_texts_of_a_prompt_and_several_prompts(chat, complete, model):
    """Text i of a prompt is what the prompt alone gives with the seed plus i."""
    asked = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
    prompts = [PROMPT, "A man"]
    way = {"temperature": 0.9, "max_new_tokens": 12}
    wanted = [model.generate(p, seed=5 + i, **way) for p in prompts for i in range(2)]
    found = complete(**asked, prompt=prompts, n=2)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == [w.text for w in wanted]
    assert wanted[0].text != wanted[1].text
    assert found.usage.prompt_tokens == sum(w.prompt_tokens for w in wanted[::2])
    assert found.usage.completion_tokens == sum(len(w.token_ids) for w in wanted)
    last, texts = 0, [""] * 4
    for chunk in complete(**asked, prompt=prompts, n=2, stream=True):
        [choice] = chunk.choices
        assert choice.index >= last
        last = choice.index
        texts[last] += choice.text
    assert texts == [w.text for w in wanted]
    asked["temperature"] = 0
    choices = chat(**asked, n=3, logprobs=True).choices
    said = model.chat(HELLO, max_new_tokens=12).text
    assert [choice.message.content for choice in choices] == [said] * 3
    usage = {"include_usage": True}
    *chunks, last = chat(**asked, n=2, stream=True, stream_options=usage)
    ends = [c.choices[0].finish_reason for c in chunks]
    assert [end for end in ends if end] == ["length", "length"]
    assert last.usage.completion_tokens == 24


def test_the_prompt_before_the_text_and_a_suffix_behind_it(
    complete, model, monkeypatch
):
    ask = partial(complete, max_tokens=8, temperature=0)
    text = model.generate(PROMPT, max_new_tokens=8).text
    ids = model.prompt(PROMPT).tolist()
    for prompt in (PROMPT, ids):
        found = ask(prompt=prompt, echo=True)
        assert found.choices[0].text == PROMPT + text
    chunks = ask(echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text
    # The toy has no such tokens, so other tokens of its own stand for them.
    names = ("<|system|>", "<|user|>", "<|assistant|>")
    monkeypatch.setattr(generation_request, "FILL_TOKENS", (("<x>",) * 3, names))
    first, second, third = map(model.parts.text.token_id, names)
    after = model.parts.text.encode("a box", add_special=False)
    ids = [first, *model.parts.text.encode(PROMPT, False), second, *after, third]
    found = ask(suffix="a box")
    assert found.choices[0].text == model.generate(token_ids=ids, max_new_tokens=8).text
    assert found.usage.prompt_tokens == len(ids)


def test_a_prediction_is_drafted_from_and_changes_no_text(chat, model):
    way = {"max_new_tokens": 60, "method": "lookup", "num_draft_tokens": 15}
    plain = model.generate(PROMPT, **way)
    good = model.generate(PROMPT, **way, prediction=plain.text)
    bad = model.generate(PROMPT, **way, prediction="The cat likes the door today.")
    assert good.text == bad.text == plain.text
    assert good.stats.target_passes < plain.stats.target_passes / 2
    assert any(good.from_draft[:2]), "the first pass has a draft already"
    again = model.generate(PROMPT, **way)
    assert again.stats.target_passes == plain.stats.target_passes
    ours = {"method": "lookup", "num_draft_tokens": 15}
    said = chat(temperature=0, extra_body=ours)
    content = said.choices[0].message.content
    for given in (content, [{"type": "text", "text": content}]):
        hint = {"type": "content", "content": given}
        again = chat(temperature=0, extra_body=ours, prediction=hint)
        assert again.choices[0].message.content == content
        details = again.usage.completion_tokens_details
        before = said.usage.completion_tokens_details.accepted_prediction_tokens
        assert details.accepted_prediction_tokens > before + 5


def test_what_changes_nothing_is_ignored_and_named(client):
    body = {"store": True, "modalities": ["text"], "keep_alive": 5, "mirostat": 0}
    asked = {"model": "toy", "messages": HELLO, "extra_body": body, "max_tokens": 2}
    for stream in (False, True):
        raw = client.chat.completions.with_raw_response.create(**asked, stream=stream)
        assert sorted(raw.headers["x-jetdraft-ignored"].split(", ")) == sorted(body)
    page = Path("docs/server.md").read_text(encoding="utf-8")
    names = (*IGNORED_FIELDS, *UNSUPPORTED_FIELDS)
    assert [name for name in names if f"`{name}`" not in page] == []


def test_more_tokens_than_the_bound_are_capped(complete):
    found = complete(max_tokens=4096, extra_body={"ignore_eos": True})
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 400


def reply_to(form, text, size, reason):
    """A reply, and the pieces and the result of a text."""
    request = GenerationRequest.of({"messages": HELLO, "tools": [WEATHER]}, True, 9)
    request = replace(request, tools=replace(request.tools, format=form))
    reply = Reply(request, "toy", TextCodec(None), "fp")
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = [Piece(part, [1], 0, texts=[part]) for part in parts]
    return reply, pieces, Result(text, [], 1, reason, Stats("none", True, 1), [])


def replied(form, text, size, reason="stop"):
    """The deltas of each piece of a text, the last choice, and the whole choice."""
    reply, pieces, result = reply_to(form, text, size, reason)
    chunks = [reply.piece_chunks(each) for each in pieces] + [reply.last_chunks(result)]
    choices = [[chunk["choices"][0] for chunk in each] for each in chunks]
    deltas = [[choice["delta"] for choice in each] for each in choices]
    return deltas, choices[-1][-1], reply.complete([result])["choices"][0]


def joined(deltas):
    """The content of deltas, and by index the names, the arguments and the pieces."""
    flat = [delta for each in deltas for delta in each]
    calls = {}
    for call in (call for delta in flat for call in delta.get("tool_calls", ())):
        begun = calls.setdefault(call["index"], [])
        assert ("id" in call) == (begun == [])
        begun.append((call["function"].get("name"), call["function"]["arguments"]))
    texts = [(c[0][0], "".join(text for _, text in c), len(c)) for c in calls.values()]
    return "".join(delta.get("content") or "" for delta in flat), texts


@pytest.mark.parametrize("size", [1, 2, 3, 7, 999])
@published
def test_calls_come_in_pieces_that_are_the_whole_calls(name, size):
    template, call = PUBLISHED[name]
    form = CallFormat.of(template)
    before = "I call.\n" if form.begin else ""
    text = f"{before}{call}\n{call}" if form.begin and not form.turn else before + call
    if form.listed and not form.pair:
        text = before + call.replace(OBJECT, f"{OBJECT}, {OBJECT}")
    deltas, last, whole = replied(form, text, size)
    said, calls = joined(deltas)
    given = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [call[:2] for call in calls] == [(g["name"], g["arguments"]) for g in given]
    assert said == (whole["message"]["content"] or "") == before.strip()
    assert last["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert all(json.loads(text) == ARGUMENTS for _, text, _ in calls)
    least = len(JSON if JSON in text else ARGUMENTS["city"]) // size + 1
    assert all(pieces >= least for _, _, pieces in calls)
    if size == 1:
        first = next(n for n, each in enumerate(deltas) if "tool_calls" in str(each))
        assert joined(deltas[:first])[0] == before.strip()
        assert text[first] in "{(\n", "the arguments begin"


@published
def test_a_call_that_breaks_off_is_not_lost(name):
    template, call = PUBLISHED[name]
    form = CallFormat.of(template)
    _, [(_, full, _)] = joined(replied(form, call, 1)[0])
    at = call.find(JSON)
    for end in range(len(call) - len(form.end) - 2):
        deltas, last, whole = replied(form, call[:end], 9, "length")
        said, calls = joined(deltas)
        arguments = [text for _, text, _ in calls]
        city, times = (max(0, end - call.index(x)) for x in ("York", "a, b"))
        assert "York"[:city] in "".join(arguments) or not calls
        assert "a, b"[:times].rstrip() in "".join([*arguments, said])
        assert call[:end].rstrip().endswith(said) if calls else said == call[:end]
        assert all(map(full.startswith, arguments))
        assert at < 0 or arguments == [JSON[: end - at]] * (end > at)
        assert whole["message"]["content"] == call[:end]
        assert last["finish_reason"] == whole["finish_reason"] == "length"


LONG = "9" * 4301  # More digits than Python reads.
BEGUN = '<tool_call>{"name": "get.weather", "arguments": '


@pytest.mark.parametrize("size", [1, 5, 999])
@cases(
    "end, rest",
    ("<tool_call>\n{", "<tool_call>\n{"),
    (" \n", ""),
    (f'{BEGUN}{{"city', ""),
    (f'{BEGUN}{{"days": 1e999}}}}!', "!"),
    (f'{BEGUN}{{"a": {LONG}}}}}!', "!"),
    ('<tool_call>{"name": "get_weather", "arguments": {}}', ...),
)
def test_what_follows_a_call_comes_as_text(size, end, rest):
    _, call = PUBLISHED["Qwen3"]
    text, rest = f"I call.\n{call}\n{end}", end if rest is ... else rest
    deltas, last, whole = replied(HERMES, text, size)
    said, calls = joined(deltas)
    assert said == (f"I call.\n\n{rest}").strip()
    assert calls[0][:2] == ("get.weather", JSON)
    message = whole["message"]
    assert message["content"] == f"I call.\n\n{end}".strip()
    assert len(message["tool_calls"]) == 1
    assert whole["finish_reason"] == "tool_calls"
    assert last["finish_reason"] == ("tool_calls" if len(calls) == 1 else "stop")
    assert len(calls) == 1 + ("get.weather" in end)
