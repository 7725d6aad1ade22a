import asyncio
import json
import re
from contextlib import contextmanager
from itertools import accumulate

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from jetdraft import Pool, Tools
from jetdraft.runtime.text.call_grammar import CallFormat
from jetdraft.server import Limits, RequestError
from jetdraft.server.app import DIALECTS, Service
from jetdraft.server.whole_requests import read_form
from tests import cases, whispers
from tests.runtime.text.test_tools import OBJECT
from tests.server.serving import connect, served
from tests.server.test_api import HELLO, PROMPT, READ_SENSOR, reply_to

ASK = [{"role": "user", "content": "What is the temperature?"}]
SENSOR = READ_SENSOR["function"]
MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/api/chat"
TOOLS = {
    MESSAGES: {"name": SENSOR["name"], "input_schema": SENSOR["parameters"]},
    RESPONSES: {"type": "function", **SENSOR},
    CHAT: READ_SENSOR,
}
ASKED = {
    MESSAGES: {"model": "toy", "max_tokens": 60},
    RESPONSES: {"model": "toy", "max_output_tokens": 60},
    CHAT: {"model": "toy", "options": {"num_predict": 60}},
}


def body_of(path, messages, stream=False, **more):
    asked = "input" if path == RESPONSES else "messages"
    return {**ASKED[path], asked: messages, "stream": stream, **more}


def post(address, path, body, **headers):
    return httpx.post(f"{address}{path}", json=body, headers=headers, timeout=60)


def events_of(answer):
    """The events of a stream; the names of server-sent events are their types."""
    if "ndjson" in answer.headers["content-type"]:
        return [json.loads(line) for line in answer.text.splitlines()]
    events = []
    for part in answer.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def said(path, answer):
    if path == MESSAGES:
        text = "".join(b["text"] for b in answer["content"] if b["type"] == "text")
        uses = [b for b in answer["content"] if b["type"] == "tool_use"]
        return text, [(b["name"], b["input"]) for b in uses], answer["stop_reason"]
    if path == RESPONSES:
        found = Response.model_validate(answer, strict=True)
        items = [item for item in found.output if item.type == "function_call"]
        calls = [(item.name, json.loads(item.arguments)) for item in items]
        return found.output_text, calls, found.status
    message = answer["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    named = [(call["name"], call["arguments"]) for call in calls]
    return message["content"], named, answer["done_reason"]


def joined(path, events):
    if path == RESPONSES:
        numbers = [event["sequence_number"] for event in events]
        assert numbers == list(range(len(events)))
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
        deltas = [e["delta"] for e in events if e["type"].endswith("text.delta")]
        whole = events[-1]["response"]
        assert "".join(deltas) == said(path, whole)[0]
        return whole
    if path == CHAT:
        calls = [c for e in events for c in e["message"].get("tool_calls", [])]
        text = "".join(event["message"]["content"] for event in events)
        assert [event["done"] for event in events[-2:]] == [False, True]
        return {**events[-1], "message": {"content": text, "tool_calls": calls}}
    content, whole = [], events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            content[-1]["json"] += delta.get("partial_json", "")
            if "text" in delta:
                content[-1]["text"] += delta["text"]
        elif event["type"] == "message_delta":
            whole = {**whole, **event["delta"], "usage": event["usage"]}
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    assert events[-1] == {"type": "message_stop"}
    return {**whole, "content": content}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_every_api_says_what_the_model_says(address, model, path, stream):
    expected = model.chat(HELLO, max_new_tokens=60)
    answer = post(address, path, body_of(path, HELLO, stream))
    assert answer.status_code == 200, answer.text
    whole = joined(path, events_of(answer)) if stream else answer.json()
    ends = {MESSAGES: "end_turn", RESPONSES: "completed", CHAT: "stop"}
    assert said(path, whole) == (expected.text, [], ends[path])
    count = len(expected.token_ids)
    if path == CHAT:
        assert whole["eval_count"] == count
        assert whole["prompt_eval_count"] == expected.prompt_tokens
        assert whole["total_duration"] >= whole["eval_duration"] > 0
    else:
        assert whole["usage"]["output_tokens"] == count


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_every_api_calls_tools_and_takes_their_results(address, model, path, stream):
    tools = {"tools": [TOOLS[path]]}
    answer = post(address, path, body_of(path, ASK, stream, **tools))
    whole = joined(path, events_of(answer)) if stream else answer.json()
    text, [(name, arguments)], reason = said(path, whole)
    assert (text, name) == ("", "read_sensor")
    assert reason in ("tool_use", "completed", "stop")
    call = {"function": {"name": name, "arguments": arguments}}
    turn, answered = {"role": "assistant"}, {"role": "tool", "content": "7"}
    wanted = [*ASK, {**turn, "tool_calls": [call]}, answered]
    if path == MESSAGES:
        result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
        use = {"type": "tool_use", "id": "c", "name": name, "input": arguments}
        more = [{**turn, "content": [use]}, {"role": "user", "content": [result]}]
    elif path == RESPONSES:
        [item] = whole["output"]
        output = {"call_id": item["call_id"], "output": "7"}
        more = [item, {"type": "function_call_output", **output}]
    else:
        more = wanted[1:]
    answer = post(address, path, body_of(path, [*ASK, *more], **tools))
    ids = model.chat_prompt(wanted, tools=[READ_SENSOR])
    expected = model.generate(token_ids=ids, max_new_tokens=60)
    assert said(path, answer.json())[0] == expected.text


@pytest.mark.parametrize("path", ASKED)
def test_a_call_that_is_cut_says_so(address, model, path):
    whole = model.chat(ASK, tools=Tools([READ_SENSOR]), max_new_tokens=60)
    begun = re.compile(r'(.|\n)*"arguments":\s*({.+)')
    texts = map(begun.fullmatch, accumulate(whole.texts))
    count, match = next((n, match) for n, match in enumerate(texts, 1) if match)
    limits = {MESSAGES: {"max_tokens": count}, RESPONSES: {"max_output_tokens": count}}
    limit = limits.get(path, {"options": {"num_predict": count}})
    body = {**body_of(path, ASK, True, tools=[TOOLS[path]]), **limit}
    events = events_of(post(address, path, body))
    if path == MESSAGES:
        parts = [e["delta"].get("partial_json", "") for e in events if "delta" in e]
        assert "".join(parts) == match[2]
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    elif path == RESPONSES:
        parts = [e["delta"] for e in events if e["type"].endswith("arguments.delta")]
        response = Response.model_validate(events[-1]["response"], strict=True)
        [item] = response.output
        assert "".join(parts) == item.arguments == match[2]
        assert item.status == response.status == "incomplete"
    else:
        said = "".join(event["message"]["content"] for event in events)
        assert said == match[0], "Ollama has whole calls only"
        assert events[-1]["done_reason"] == "length"


OPEN = OBJECT[: OBJECT.index("{", 1)]
CALLED, CUT = f"<tool_call>{OBJECT}</tool_call>", f'<tool_call>{OPEN}{{"x": 1'
LISTED = "<TOOLCALL>[{...}]</TOOLCALL>"


@pytest.mark.parametrize("size", [1, 7, 9999])
@cases(
    "text, reason, statuses",
    (f"Hi {CALLED}", "stop", ["completed"]),
    (f"{CUT}}}", "stop", ["incomplete"]),
    (f"{CUT}e999}}}}</tool_call> Bye", "stop", ["incomplete"]),
    (f"{CUT[:-1]}{'[' * 3000}", "length", ["incomplete"]),
    (f"{CALLED}\n{CALLED}", "stop", ["completed"] * 2),
    (f"{CALLED}\n{CUT}", "length", ["completed", "incomplete"]),
    (f"<TOOLCALL>[{OBJECT}, {OBJECT}]", "stop", ["completed"] * 2),
    (f"<TOOLCALL>[{OBJECT}, {OBJECT}", "stop", ["incomplete"] * 2),
    ids=lambda value: str(value)[:40],
)
def test_responses_tell_a_broken_call_from_a_call_to_run(size, text, reason, statuses):
    form = CallFormat.of("<tool_call>" if "<tool_call>" in text else LISTED)
    reply, pieces, result = reply_to(form, text, size, reason)

    async def chunks():
        for piece in pieces:
            for chunk in reply.piece_chunks(piece):
                yield chunk
        for chunk in reply.last_chunks(result):
            yield chunk

    async def events():
        return [e async for e in DIALECTS[RESPONSES].events(chunks(), reply)]

    found = asyncio.run(events())
    Response.model_validate(found[-1]["response"], strict=True)
    output = found[-1]["response"]["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    assert [item["status"] for item in calls] == statuses
    done = [e for e in found if e["type"] == "response.output_item.done"]
    assert [e["item"] for e in sorted(done, key=lambda e: e["output_index"])] == output
    whole = DIALECTS[RESPONSES].whole(reply.complete([result]), reply)["output"]
    ran = [item["arguments"] for item in whole if item["type"] == "function_call"]
    assert ran == [c["arguments"] for c in calls if c["status"] == "completed"]


def test_items_of_one_turn_are_one_message_and_none_is_lost():
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "a"}
    thought = {"type": "reasoning", "summary": [{"type": "s", "text": "t"}]}
    items = [*HELLO, thought, {**call, "call_id": "1"}, {**call, "call_id": "2"}, said]
    body, chat = DIALECTS[RESPONSES].body({"input": [*items, {**said, "content": "b"}]})
    assert chat
    _, first, second = body["messages"]
    assert (first["reasoning_content"], first["content"]) == ("t", "a")
    assert [one["id"] for one in first["tool_calls"]] == ["1", "2"]
    assert second["content"] == "b"
    result = {"type": "tool_result", "tool_use_id": "1", "content": "7"}
    blocks = [{"type": "text", "text": "a", "cache_control": {}}, result]
    turns = [*HELLO, {"role": "user", "content": blocks}, *HELLO]
    body, _ = DIALECTS[MESSAGES].body({"messages": turns})
    assert [message["role"] for message in body["messages"]] == ["user", "tool", "user"]
    texts = [part["text"] for part in body["messages"][-1]["content"]]
    assert texts == ["a", "\n", "Hello"]


def test_the_system_s_text_and_the_form_of_an_answer(address, model):
    system = [{"role": "system", "content": "Be brief."}]
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    bodies = {
        MESSAGES: {"system": "Be brief.", "output_config": {"format": form}},
        RESPONSES: {
            "instructions": "Be brief.",
            "text": {"format": {**form, "name": "a"}, "verbosity": "low"},
            "reasoning": {"effort": None, "summary": "auto", "mode": "pro"},
            "client_metadata": {"session": "a"},
        },
        CHAT: {"format": schema},
    }
    way = {"max_new_tokens": 60, "json_schema": schema}
    expected = model.chat([*system, *HELLO], **way).text
    assert json.loads(expected)["a"] < 10
    for path, more in bodies.items():
        turns = [*system, *HELLO] if path == CHAT else HELLO
        answer = post(address, path, body_of(path, turns, **more))
        assert said(path, answer.json())[0] == expected
        wanted = "client_metadata, text.verbosity, reasoning.summary, reasoning.mode"
        named = wanted if path == RESPONSES else None
        assert answer.headers.get("x-jetdraft-ignored") == named
    body = {"model": "toy:latest", "system": "Be brief.", "prompt": "Hello"}
    body |= {"stream": False, "options": ASKED[CHAT]["options"]}
    answer = post(address, "/api/generate", body).json()
    assert answer["response"] == model.chat([*system, *HELLO], max_new_tokens=60).text
    body |= {"prompt": PROMPT, "raw": True, "logprobs": False, "n": 1}
    answer = post(address, "/api/generate", body)
    assert answer.json()["response"] == model.generate(PROMPT, max_new_tokens=60).text


def test_how_a_text_was_cut(address):
    body = body_of(MESSAGES, HELLO, stop_sequences=["toy"])
    found = post(address, MESSAGES, body).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "toy")
    found = post(address, MESSAGES, {**body, "max_tokens": 2}).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    cut = body_of(RESPONSES, "Hello", max_output_tokens=2)
    found = post(address, RESPONSES, cut).json()
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


def message_of(path, error):
    if path.startswith("/api/"):
        assert error.keys() == {"error"}
        return error["error"]
    if path == MESSAGES:
        assert error["type"] == "error"
        assert error["error"].keys() == {"type", "message"}
        return error["error"]["message"]
    assert error["error"].keys() == {"message", "type", "param", "code"}
    return "{param}: {message}".format_map(error["error"])


UNWRITTEN = {"logprobs": 3, "top_logprobs": 2, "include_drafted": True, "n": 9}
ASKING = {path: body_of(path, HELLO) for path in ASKED}
ASKING["/api/generate"] = {"model": "toy", "prompt": "a", "raw": True}
WRONG = (
    (MESSAGES, {}, "'messages' is missing"),
    (MESSAGES, {"messages": 5}, "a field has another type than in this API"),
    (MESSAGES, {"messages": []}, "list of messages"),
    (MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "end"),
    (MESSAGES, {"messages": HELLO, "tools": [{"type": "bash"}]}, "'bash' does not run"),
    (MESSAGES, {"messages": HELLO, "mcp_servers": [{}]}, "mcp_servers is not suppo"),
    (MESSAGES, {"messages": HELLO, "model": "x"}, "ask for 'toy'"),
    (RESPONSES, {}, "'input' is missing"),
    (RESPONSES, {"input": [5]}, "a field has another type than in this API"),
    (RESPONSES, {"input": "a", "previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "a"}]}, "item_reference"),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "web_search"),
    (RESPONSES, {"input": "a", "prompt": {"id": "a"}}, "prompt: prompt is not"),
    (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"]}, "include"),
    (RESPONSES, {"input": "a", "text": {"colour": "red"}}, "text.colour: unknown"),
    (RESPONSES, {"input": "a", "text": "x"}, "text: text must be an object"),
    (RESPONSES, {"input": "a", "reasoning": {"efort": 5}}, "reasoning.efort'; leave"),
    (MESSAGES, {"messages": HELLO, "output_config": {"budget": 5}}, "output_config.bu"),
    *(
        (path, {**body, name: value}, f"no {name}; leave it out")
        for path, body in ASKING.items()
        for name, value in UNWRITTEN.items()
    ),
    ("/api/chat", {"messages": HELLO}, "'model' is missing"),
    ("/api/chat", {"model": "toy", "messages": [{"role": "x"}]}, "role must be one"),
    ("/api/chat", {"model": "toy", "messages": HELLO, "options": 5}, "another"),
    ("/api/chat", {"model": "toy", "messages": HELLO, "options": {"mirostat": 1}}, "m"),
    ("/api/generate", {"model": "toy", "prompt": "a", "context": [1]}, "context is n"),
    ("/api/generate", {"model": "toy", "promt": "a"}, "did you mean prompt?"),
    ("/api/generate", {**ASKING["/api/generate"], "prompt": ["a", "b"]}, "prompt must"),
    ("/api/chat", {"model": "toy", "mesages": HELLO}, "'messages' is missing"),
    ("/api/generate", {"model": "toy", "prompt": "a", "suffix": "b"}, "fim_middle"),
)


@pytest.mark.parametrize(("path", "body", "words"), WRONG)
def test_wrong_bodies_are_refused_in_the_api_s_own_shape(address, path, body, words):
    answer = post(address, path, body)
    assert answer.status_code in (400, 404), answer.text
    message = message_of(path, answer.json())
    assert words in message
    if path == RESPONSES and UNWRITTEN.keys() & body.keys():
        assert f"no {message.partition(':')[0]}; leave" in words


@pytest.mark.parametrize("path", ASKING)
def test_an_error_in_a_stream_has_the_api_s_shape(address, path):
    body = {**ASKING[path], "grammar": 'start: "a"{10000000}', "stream": True}
    *_, last = events_of(post(address, path, body))
    if path == RESPONSES:
        assert (last["type"], last["param"]) == ("error", "grammar")
    else:
        assert message_of(path, last)


def test_a_stream_of_messages_that_is_cut_is_overloaded(fresh, slow):
    body = body_of(MESSAGES, HELLO, True, ignore_eos=True)
    with (
        served(fresh) as address,
        httpx.stream("POST", f"{address}{MESSAGES}", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        fresh.desk.end_jobs()
        *_, last = [line for line in lines if line.startswith("data: ")]
    error = json.loads(last.removeprefix("data: "))
    assert error["error"]["type"] == "overloaded_error"


@cases(
    "path, body, said",
    ("/api/generate", {}, {"response": ""}),
    ("/api/generate", {"prompt": "", "stream": False}, {"response": ""}),
    (CHAT, {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
)
def test_a_request_without_a_text_loads_and_writes_nothing(fresh, path, body, said):
    with served(fresh) as address:
        answer = post(address, path, {"model": "toy:latest", "keep_alive": -1, **body})
        assert post(address, path, {"model": "x", **body}).status_code == 404
    found = answer.json()
    assert found.pop("created_at")
    assert found == {"model": "toy", "done": True, "done_reason": "load", **said}
    assert fresh.desk.total.prompt_tokens == 0


def test_a_client_may_forget_the_type_of_its_body_but_a_page_may_not(address):
    data = json.dumps(body_of(CHAT, HELLO)).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl -d
    for headers in ({}, form):
        for page, status in (({}, 200), ({"Origin": "null"}, 415)):
            asked = {**headers, **page}
            answer = httpx.post(f"{address}{CHAT}", content=data, headers=asked)
            assert answer.status_code == status


def test_what_clients_ask_of_a_model(address, model):
    tags = httpx.get(f"{address}/api/tags").json()["models"]
    shown = post(address, "/api/show", {"model": "toy:latest"}).json()
    assert [tag["model"] for tag in tags] == ["toy"]
    assert shown["model_info"]["jetdraft.context_length"] == 512
    assert shown["template"] == model.template.source
    assert post(address, "/api/show", {"model": "x"}).status_code == 404
    assert httpx.get(f"{address}/api/version").json()["version"]
    listed = httpx.get(f"{address}/v1/models").json()
    assert (listed["first_id"], listed["has_more"]) == ("toy", False)
    wrong = httpx.get(f"{address}/v1/models/x", headers={"anthropic-version": "1"})
    assert "no model 'x'" in message_of(MESSAGES, wrong.json())


def test_keys_and_origins(service):
    page = {"Origin": "http://localhost:3000"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "content-type,x-api-key"
    own = Service(service.pool, "toy", api_key="sesame", origins=[page["Origin"]])
    with served(own) as address:
        for path in DIALECTS:
            assert post(address, path, {}, **{"x-api-key": "x"}).status_code == 401
        good = body_of(MESSAGES, HELLO, store=True)
        answer = post(address, MESSAGES, good, **{"x-api-key": "sesame"}, **page)
        assert answer.headers["access-control-allow-origin"] == page["Origin"]
        assert answer.headers["x-jetdraft-ignored"] == "store"
        for origin, status in ((page["Origin"], 200), ("http://evil.example", 400)):
            headers = {**asks, "Origin": origin}
            answer = httpx.options(f"{address}{MESSAGES}", headers=headers)
            assert answer.status_code == status


SOUND = whispers.wav(whispers.sound(1.5))


@contextmanager
def listening(whisper, **limits):
    with (
        Pool(whisper / "bundle", 1, threads=1) as pool,
        served(Service(pool, "whisper", Limits(**limits))) as address,
    ):
        yield address, pool.models[0].twin()


@pytest.fixture(scope="module")
def hearing(whisper):
    with listening(whisper, max_sound_bytes=100_000) as found:
        yield found


def upload(address, **parts):
    return httpx.post(f"{address}/v1/audio/transcriptions", **parts)


@pytest.fixture(scope="module")
def audio(hearing):
    with OpenAI(base_url=f"{hearing[0]}/v1", api_key="none", max_retries=0) as client:
        yield client.audio.transcriptions


def test_every_format_has_the_transcript_and_drafts_the_same(audio, hearing):
    wanted = hearing[1].transcribe(SOUND, language="en", method="none")
    asked = {"model": "whisper", "file": ("a.wav", SOUND), "language": "en"}
    assert audio.create(**asked).text == wanted.text
    ours = {"method": "draft", "num_draft_tokens": 3}
    assert audio.create(**asked, extra_body=ours).text == wanted.text
    text = audio.create(**asked, response_format="text")
    assert text.rstrip("\n") == wanted.text
    verbose = audio.create(**asked, response_format="verbose_json")
    assert (verbose.language, float(verbose.duration)) == ("en", 1.5)
    assert [part.tokens for part in verbose.segments] == [
        segment.token_ids for segment in wanted.segments
    ]
    assert audio.create(**asked, response_format="srt").startswith("1\n00:00:00,")
    assert audio.create(**asked, response_format="vtt").startswith("WEBVTT\n\n00:")


@cases(
    "changes, said, param",
    ({"file": b""}, "is empty", "file"),
    ({"file": b"no sound"}, "is not a WAV file", "file"),
    ({"file": SOUND[:44]}, "at least 0.1", "file"),
    ({"language": "xx"}, "no language", "language"),
    ({"response_format": "mp3"}, "there is no format", "response_format"),
    ({"prompt": "before"}, "prompt is not supported", "prompt"),
    ({"stream": "true"}, "stream is not supported", "stream"),
    ({"temperature": "hot"}, "is not a number", "temperature"),
    ({"colour": "red"}, "unknown field 'colour'", None),
)
def test_bad_requests_are_refused(hearing, changes, said, param):
    fields = {"model": "whisper", **changes}
    files = {"file": ("a.wav", fields.pop("file", SOUND))}
    answer = upload(hearing[0], files=files, data=fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_what_is_no_upload_is_refused(hearing, audio):
    address, foreign = hearing[0], {"origin": "https://example.org"}
    assert upload(address, json={"model": "whisper"}).status_code == 415
    assert upload(address, files={"other": b"x"}).status_code == 400
    assert upload(address, files={"file": b"x" * 200_000}).status_code == 413
    assert upload(address, files={"file": SOUND}, headers=foreign).status_code == 403
    with pytest.raises(openai.NotFoundError):
        audio.create(model="other", file=("a.wav", SOUND))


def test_a_bundle_of_the_other_kind_refuses_before_it_reads(hearing, address):
    text = {"model": "whisper", "prompt": "hello"}
    answer = httpx.post(f"{hearing[0]}/v1/completions", json=text)
    assert answer.status_code == 400
    assert "hears, and reads no text" in answer.json()["error"]["message"]
    answer = upload(address, files={"file": SOUND})
    assert answer.status_code == 400
    assert "hears nothing" in answer.json()["error"]["message"]
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 99\r\n"
    with connect(address) as client:
        client.sendall(f"{head}\r\n".encode())
        assert b"400" in client.recv(100)  # and no byte of a body was sent


def test_a_text_that_was_cut_says_so(whisper):
    with listening(whisper, max_seconds=1e-6, max_sounds=1) as (address, _):
        for form in ("json", "verbose_json"):
            asked = {"response_format": form}
            answer = upload(address, files={"file": SOUND}, data=asked)
            assert answer.json()["finish_reason"] == "length"


def test_sounds_wait_for_memory(whisper):
    with listening(whisper, max_sounds=0, max_wait=0.01) as (address, _):
        assert upload(address, files={"file": SOUND}).status_code == 503


def test_forms_are_read_to_the_byte():
    data = b"\r\n--x\r\n--xy\x00\xff\r\n"
    head = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    body = b"--bound\r\n" + head + data + b"\r\n--bound--\r\n"
    kind = "multipart/form-data; boundary=bound"
    assert read_form(body, kind) == {"file": [data]}
    named = body.replace(b'"a"', '"\u00e9.wav"'.encode())
    assert read_form(named, kind) == {"file": [data]}
    for wrong, type_ in (
        (body, "multipart/form-data"),
        (body[:-6], kind),
        (b"", kind),
        (b"--bound\r\nno head\r\n--bound--", kind),
        (b"--bound\r\nA: b\r\n\r\nx\r\n--bound--", kind),
        (body.replace(b"--bound--", (b"--bound\r\n" + head + b"\r\n") * 40), kind),
        # What the standard library reads as RFC 2231, and fails at.
        (body, "multipart/form-data; boundary*=undefined''bound"),
        (body, f"multipart/form-data; boundary*{'9' * 5000}=bound"),
        (body.replace(b'name="file"', b"name*0*=a; name*=b"), kind),
    ):
        with pytest.raises(RequestError, match="not a multipart form"):
            read_form(wrong, type_)
