import json
import signal
import socket
import threading
import time
from dataclasses import replace

import httpx
import openai
import pytest
from openai import BadRequestError
from openai.types.shared import ErrorObject

from jetdraft.runtime.text.codec import TextCodec
from jetdraft.server.app import Service
from jetdraft.server.connection import host_name, is_loopback
from tests import cases
from tests.programs import assert_refused, jetdraft
from tests.runtime.text.test_tools import tool
from tests.runtime.text.test_worker import FOREVER, is_alive, workers
from tests.server.conftest import LIMITS
from tests.server.serving import connect, read, request, served, started, until
from tests.server.test_api import form_of
from tests.server.test_openai_fields import checked

GOOD = {"model": "toy", "prompt": "a", "max_tokens": 2}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "a"}]}
WRONG = tool({"type": "strung"}, "g")
TOOL = {"type": "function", "function": {"name": "f"}}
FOLLOWED = ("@evil.example", ",evil.example")
MALFORMED = ["ev{il.example", 'ev"il.example', "evil^.example", "loc\xe4lhost"]
MALFORMED += [f"evil.example:{port}" for port in ("99999", "x")]
MALFORMED += ["a b", "", "[::1", "::1"]
MALFORMED += [f"localhost{end}" for end in (":", ":80:80", "/", *FOLLOWED)]
FOREIGN = ("evil.example", "localhost.evil.example", "[2001:db8::1]", "10.0.0.1:80")
OWN = ("localhost", "LOCALHOST:1".lower(), "127.0.0.1:8080", "[::1]:8080", "127.0.0.9")
BRIEF = {"model": "toy", "prompt": "a", "max_tokens": 4, "temperature": 0}
PROPERTIES = {f"name{i}": {"type": "string"} for i in range(10_000)}
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"properties": PROPERTIES}}}
PATTERN = {"type": "string", "pattern": "^" + "(ab|cd)?" * 50_000 + "$"}


def call(**changes):
    return {"function": {"name": "f", "arguments": "{}", **changes}}


def calling(arguments):
    calls = [call(arguments=arguments)]
    return {"messages": [{"role": "assistant", "tool_calls": calls}]}


def post(address, body, path="completions", **headers):
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"Content-Type": "application/json", **headers}
    url = f"{address}/v1/{path}"
    return httpx.post(url, content=content, headers=headers, timeout=30)


def error(response):
    return response.json()["error"]


def assert_error(response, status, words):
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    checked(ErrorObject, error(response))
    assert words in error(response)["message"]
    assert "\n" not in error(response)["message"]


@cases(
    "body, words",
    ("", "not JSON"),
    ("{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    ("[" * 9000, "not JSON"),
    ("[]", "must be a JSON object"),
    ({"model": "toy"}, "give a prompt"),
    ({**GOOD, "prompt": ["a"] * 65}, "at most 64 prompts"),
    ({**GOOD, "prompt": ["a", 5]}, "give a prompt"),
    ({**GOOD, "prompt": [1.5]}, "give a prompt"),
    ({**GOOD, "prompt": [999_999]}, "vocabulary"),
    ({**GOOD, "prompt": ""}, "empty"),
    ({**GOOD, "prompt": "a b " * 500}, "capacity"),
    ({**GOOD, "temperatur": 1}, "'temperatur'; did you mean temperature?"),
    ({**GOOD, "temperature": "hot"}, "temperature 'hot'"),
    ({**GOOD, "temperature": -1}, "out of range"),
    ({**GOOD, "max_tokens": -1}, "gives 1 to 400"),
    ({**GOOD, "n": 9}, "n 9 is out of range; this server gives 1 to 8"),
    ({**GOOD, "n": 2, "best_of": 3}, "best_of can only be n"),
    ({**GOOD, "prompt": ["a"] * 64, "n": 8, "max_tokens": 400}, "more than 131072"),
    ({**GOOD, "echo": True, "logprobs": 1}, "echo gives no logprobs"),
    ({**GOOD, "suffix": "b"}, "suffix needs a model that fills gaps"),
    ({**GOOD, "modalities": ["audio"]}, "modalities is not supported"),
    ({**GOOD, "guided_json": {}}, "guided_json is not supported"),
    ({**GOOD, "prediction": "a"}, 'prediction must be {"type": "content"'),
    ({**GOOD, "stream": "yes"}, "neither true nor false"),
    ({**GOOD, "stop": ""}, "stop string is empty"),
    ({**GOOD, "stop": [1]}, "not a list of texts"),
    ({**GOOD, "stop": 5}, "not a list of texts"),
    ({**GOOD, "logit_bias": {"a": 1}}, "must be an object from token ids"),
    ({**GOOD, "logit_bias": {"999999": 1}}, "outside the vocabulary"),
    ({**GOOD, "max_seconds": "x"}, "max_seconds"),
    ({**GOOD, "max_tokens": "x"}, "max_tokens 'x' is out of range"),
    ({**GOOD, "max_tokens": 0}, "max_tokens 0 is out of range"),
    ({**GOOD, "method": "stream"}, "no method 'stream'"),
    ({**GOOD, "regex": "a(b"}, "character 2"),
    ({**GOOD, "regex": "\udc80"}, "lone surrogate"),
    ({**GOOD, "\udc80": 1}, "lone surrogate"),
    ({**GOOD, "logit_bias": [[1, 1]]}, "must be an object from token ids"),
    ('{"prompt": "a", "logit_bias": [[Infinity, 1]]}', "not JSON"),
    ('{"prompt": "a", "logit_bias": {"5": %s}}' % ("9" * 400), "not JSON"),
    ('{"prompt": "a", "temperature": 1e999}', "not JSON"),
    ({**GOOD, "logit_bias": {"5": 1e300}}, "not a number of 32 bits"),
    ({**GOOD, "stop": ["a"] * 17}, "stop has 17 texts"),
    ({**GOOD, "stop": "a" * 1001}, "stop has 1 texts of up to 1001 characters"),
    ({**GOOD, "json_schema": {"properties": {"\ud800": {}}}}, "surrogate"),
    ({**GOOD, "response_format": {"type": "xml"}}, "json_schema"),
    ({**GOOD, "json_schema": {"type": "x"}, "regex": "a"}, "exclude each other"),
)
def test_wrong_completions(address, body, words):
    assert_error(post(address, body), 400, words)


@cases(
    "changes, words",
    ({"messages": []}, "list of messages"),
    ({"messages": "hi"}, "list of messages"),
    ({"messages": [{"content": "a"}]}, "messages[0] must be an object with a role"),
    ({"messages": [{"role": "user", "content": 3}]}, "must be a text or a list"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "in base64"),
    ({"tools": "f"}, "give tools as"),
    ({"tools": [{"type": "function"}]}, "give tools as"),
    ({"tools": [TOOL], "tool_choice": "g"}, "none of f"),
    ({"tool_choice": "required"}, "needs tools"),
    ({"tools": [TOOL], "tool_choice": 3}, "tool_choice must be"),
    ({"tools": [TOOL], "regex": "a"}, "exclude each other"),
    ({"tools": [TOOL], "json_schema": "{}"}, "must be an object"),
    ({"tools": [TOOL, WRONG]}, "tool 'g': the JSON schema is refused at /prop"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "must be a list"),
    ({"messages": [{"role": "\ud800", "content": "a"}]}, "surrogate"),
    ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]}, "lone"),
    (calling('"\\ud800"'), "surrogate"),
    (calling("[" * 9000), "not JSON"),
    (calling("{"), "not JSON"),
    (form_of({"properties": {"a": {"type": "x"}}}), "/properties/a"),
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_chats(address, changes, words, stream):
    body = {**CHAT, "stream": stream, **changes}
    assert_error(post(address, body, "chat/completions"), 400, words)


BROKEN, LISTED = [call(), call(arguments="{")], [call(arguments="[1]")]
OBJECT = "the text of a JSON object"


@cases(
    "fields, place, words",
    ({"role": "usr"}, "role", "must be one of system, developer, user, assistant,"),
    ({"role": "function"}, "role", "must be one of"),
    ({"role": 5}, "role", "with a role"),
    ({"role": "user", "content": None}, "content", "must be a text or a list"),
    ({"role": "system", "content": 7}, "content", "must be a text or a list"),
    ({"content": ["a"]}, "content[0]", "must be a text, or an"),
    ({"content": [{"type": "text"}]}, "content[0]", "must be a text, or an"),
    ({"content": [{"type": "text", "text": "a"}, {}]}, "content[1]", "or an image in"),
    ({"name": 5}, "name", "must be a text"),
    ({"refusal": ["no"]}, "refusal", "must be a text"),
    ({"role": "tool"}, "tool_call_id", "the id of the call that is answered"),
    ({"role": "tool", "tool_call_id": 5}, "tool_call_id", "must be a text"),
    ({"audio": {"id": "a"}}, "audio", "is not supported; give content"),
    ({"function_call": {}}, "function_call", "is not supported; give tool_calls"),
    ({"tool_calls": {}}, "tool_calls", "must be a list of calls"),
    ({"tool_calls": [5]}, "tool_calls[0]", 'must be {"id": "..."'),
    ({"tool_calls": [call(name=None)]}, "tool_calls[0]", "must be {"),
    ({"tool_calls": [{**call(), "id": 5}]}, "tool_calls[0]", "must be {"),
    ({"tool_calls": [{"function": {"name": "f"}}]}, "tool_calls[0]", "must be {"),
    ({"tool_calls": BROKEN}, "tool_calls[1].function.arguments", "is not JSON"),
    ({"tool_calls": LISTED}, "tool_calls[0].function.arguments", f"must be {OBJECT}"),
)
def test_a_wrong_message_is_named_with_its_field(address, fields, place, words):
    wrong = {"role": "assistant", "content": "b", **fields}
    body = {**CHAT, "messages": [*CHAT["messages"], wrong]}
    answer = error(post(address, body, "chat/completions"))
    assert answer["message"].startswith("messages[1]")
    assert words in answer["message"]
    assert answer["param"] == f"messages[1].{place}"


@cases(
    "fields",
    {"tool_calls": []},
    {"tool_calls": None, "content": None},
    {"content": None, "tool_calls": [{**call(), "id": "call_1"}]},
    {"content": [], "refusal": None, "audio": None, "function_call": None},
    {"content": [{"type": "refusal", "refusal": "b"}], "annotations": []},
    {"name": "ann", "refusal": "no", "tool_calls": [call(arguments={"a": 5})]},
    {"role": "tool", "tool_call_id": "call_1", "content": ""},
    {"role": "developer", "name": "ann"},
    ids=str,
)
def test_what_is_harmless_in_a_message_is_taken(address, fields):
    taken = {"role": "assistant", "content": "b", **fields}
    body = {**CHAT, "messages": [*CHAT["messages"], taken], "max_tokens": 1}
    assert post(address, body, "chat/completions").status_code == 200


def test_other_errors(address):
    assert_error(post(address, {**GOOD, "model": "x"}), 404, "ask for 'toy'")
    assert_error(post(address, {**GOOD, "user": "x" * 20_000}), 413, "20000 bytes")
    wrong = {"Content-Type": "text/plain"}
    assert_error(post(address, GOOD, **wrong), 415, "application/json")
    assert_error(httpx.get(f"{address}/v1/completions"), 405, "Method Not Allowed")
    assert_error(httpx.get(f"{address}/v2"), 404, "/v2")
    assert_error(httpx.get(f"{address}/v1/models/x"), 404, "no model 'x'")
    for host in ("evil.example", "192.168.0.1:8080"):
        assert_error(post(address, GOOD, Host=host), 400, "ask for localhost")
        page = httpx.get(f"{address}/", headers={"Host": host})
        assert_error(page, 400, "ask for localhost")
    assert post(address, {**GOOD, "model": None}).status_code == 200
    cased = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert post(address, GOOD, **cased).status_code == 200
    assert post(address, GOOD).status_code == 200, "nothing else was lost"


@pytest.mark.parametrize("length", [2000, 19_000])
def test_a_prompt_that_is_too_long_has_openais_code(service, length, monkeypatch):
    limits = replace(LIMITS, max_body_bytes=1_000_000)
    text = "a b " * length
    if length == 19_000:
        monkeypatch.setattr(TextCodec, "encode", None)
    with served(Service(service.pool, "toy", limits)) as address:
        messages = [{"role": "user", "content": text}]
        for path, body, param in (
            ("completions", {**GOOD, "prompt": text}, "prompt"),
            ("chat/completions", {**CHAT, "messages": messages}, "messages"),
        ):
            answer = error(post(address, body, path))
            assert answer["code"] == "context_length_exceeded"
            assert answer["param"] == param
        way = {"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**way) as client, pytest.raises(BadRequestError) as refused:
            client.completions.create(**{**GOOD, "prompt": text})
        assert refused.value.code == "context_length_exceeded"


def test_codes_and_params(address):
    answer = error(post(address, {**GOOD, "model": "x"}))
    assert (answer["code"], answer["param"]) == ("model_not_found", "model")
    answer = error(post(address, {**GOOD, "top_p": 7}))
    assert (answer["code"], answer["param"]) == (None, "top_p")
    answer = error(post(address, {**GOOD, "max_tokens": 0}))
    assert answer["param"] == "max_tokens"


def test_what_a_client_sent_comes_back_short_and_on_one_line(address):
    message = error(post(address, {**GOOD, "method": "x" * 10_000}))["message"]
    assert message.startswith("unknown method 'xxx")
    assert len(message) <= 1000
    tool = {"type": "function", "function": {"name": "a\nb\x1b[2J"}}
    chosen = {"type": "function", "function": {"name": "c"}}
    body = {**CHAT, "tools": [tool], "tool_choice": chosen}
    message = error(post(address, body, "chat/completions"))["message"]
    assert message.isprintable()


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_ends_in_mid_text_is_the_client_s_error(address, stream):
    """The library looks for the tokens that must follow, and there are too many."""
    body = {**GOOD, "grammar": 'start: "a"{10000000}', "stream": stream}
    answer = post(address, body)
    assert answer.status_code == (200 if stream else 400)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")]
    refusal = json.loads(lines[-3] if stream else answer.text)["error"]
    assert (refusal["type"], refusal["param"]) == ("invalid_request_error", "grammar")


def test_encoding_lets_other_threads_run(model):
    """A long prompt must not stop the event loop."""
    text, count, done = "The robot sees a box. " * 20_000, 0, threading.Event()

    def encode():
        model.parts.text.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        count += 1
        time.sleep(0.001)
    thread.join()
    assert count > 10


def test_a_body_that_lies_about_its_length_is_cut_off(address):
    def parts():
        for _ in range(100):
            yield b" " * 1000

    kind = {"Content-Type": "application/json"}
    response = httpx.post(f"{address}/v1/completions", content=parts(), headers=kind)
    assert_error(response, 413, "send less")


def test_a_body_that_does_not_come(address, monkeypatch):
    monkeypatch.setattr("jetdraft.server.app.RECEIVE_SECONDS", 0.1)
    with connect(address) as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        assert line.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_keys(service):
    with served(Service(service.pool, "toy", api_key="sesame")) as address:
        for given in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sesam"}):
            refused = post(address, GOOD, **given)
            assert_error(refused, 401, "API key")
            assert error(refused)["code"] == "invalid_api_key"
            for path in ("v1/models", "v1/models/toy", "metrics"):
                response = httpx.get(f"{address}/{path}", headers=given)
                assert_error(response, 401, "API key")
        key = {"Authorization": "bearer sesame"}
        assert post(address, GOOD, **key).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200


def test_who_can_reach_an_address():
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "pi"))


def ask(address, host):
    with connect(address) as line:
        line.sendall(request(GOOD).replace(b"localhost", host.encode("latin-1")))
        line.shutdown(socket.SHUT_WR)
        return int(read(line).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")[9:12])


@pytest.mark.parametrize("host", [*MALFORMED, *FOREIGN, *OWN])
def test_only_local_hosts_are_answered(address, host):
    assert ask(address, host) == (200 if host in OWN else 400)


def test_a_request_without_a_host_is_refused(address):
    with connect(address) as line:
        line.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read(line).startswith(b"HTTP/1.1 400 ")


def test_hosts_are_parsed():
    assert [host_name(host) for host in MALFORMED] == [None] * len(MALFORMED)
    assert (host_name("robot.local:80"), host_name("[::1]")) == ("robot.local", "::1")


@pytest.mark.parametrize("key", ["", " key", "a key", "key\n", "schlüssel"])
@pytest.mark.parametrize("by_environment", [False, True])
def test_keys_that_nobody_could_send(tmp_path, monkeypatch, key, by_environment):
    if by_environment:
        monkeypatch.setenv("JETDRAFT_API_KEY", key)
    words = () if by_environment else ("--api-key", key)
    assert_refused(jetdraft("serve", tmp_path, "--port", 0, *words), "the API key")


@pytest.fixture(scope="module")
def limited(toy):
    with started(toy, "--models", 2, "--drain", 2, "--name", "toy") as (_, address):
        yield address


def timed(address, body, path="completions"):
    start, answer = time.monotonic(), post(address, body, path)
    return answer.status_code, answer.json(), time.monotonic() - start


def generating(address):
    return httpx.get(f"{address}/health").json()["generating"]


def test_a_grammar_that_never_ends_is_answered_in_time(limited):
    status, answer, seconds = timed(limited, {**BRIEF, "grammar": FOREVER})
    assert (status, answer["error"]["param"]) == (400, "grammar")
    assert "too much time or memory" in answer["error"]["message"]
    assert seconds < 20
    # A client that set a limit gets the text so far, as with any text.
    body = {**BRIEF, "grammar": FOREVER, "max_seconds": 0.5}
    status, answer, seconds = timed(limited, body)
    choice = answer["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "", "length")
    assert seconds < 3
    assert timed(limited, {**BRIEF, "regex": "yes"})[1]["choices"][0]["text"] == "yes"


@cases(
    "path, more, param",
    ("completions", {"regex": "a" * 64_001}, "regex"),
    ("completions", {"json_schema": PATTERN}, "json_schema"),
    ("completions", {"json_schema": json.dumps(PATTERN)}, "json_schema"),
    ("completions", {"json_schema": {"properties": PROPERTIES}}, "json_schema"),
    ("chat/completions", {"tools": [tool({"properties": PROPERTIES})]}, "tools"),
    ("chat/completions", {"response_format": FORMAT}, "response_format"),
)
def test_schemas_and_tools_have_the_limit_of_grammars(limited, path, more, param):
    body = {"messages": [{"role": "user", "content": "a"}], **BRIEF, **more}
    del body["messages" if path == "completions" else "prompt"]
    status, answer, seconds = timed(limited, body, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "longer than" in answer["error"]["message"]
    assert seconds < 2


def test_tools_that_take_too_long_are_refused(limited):
    pattern = {"type": "string", "pattern": "^(.*a.{30}){30}(.*b.{30}){99}$"}
    slow = tool({"type": "object", "properties": {"a": pattern}, "required": ["a"]})
    body = {**BRIEF, "tools": [slow] * 100, "tool_choice": "required"}
    body["messages"] = [{"role": "user", "content": "a"}]
    del body["prompt"]
    status, answer, seconds = timed(limited, body, "chat/completions")
    assert status == 400, answer
    assert answer["error"]["message"]
    assert seconds < 12


def test_a_client_that_leaves_frees_the_model(limited):
    with connect(limited, {**BRIEF, "grammar": FOREVER}):
        until(lambda: generating(limited) == 1, 5)
        time.sleep(0.5)
    until(lambda: generating(limited) == 0, 2)


def test_sigterm_ends_a_compilation(toy):
    with started(toy, "--drain", 1, "--name", "toy") as (process, address):
        assert timed(address, {**BRIEF, "regex": "yes"})[0] == 200
        until(lambda: len(workers({process.pid})) == 1, 5)  # it waits for texts
        with connect(address, {**BRIEF, "grammar": FOREVER}):
            until(lambda: len(workers({process.pid})) == 2, 5)
            left = workers({process.pid})
            process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            process.wait(8)
            assert time.monotonic() - start < 3
        until(lambda: not any(map(is_alive, left)), 2)
