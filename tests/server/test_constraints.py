"""Requests whose constraints take too much: answered in time, and no model is lost."""

import http.client
import json
import signal
import time
from urllib.parse import urlsplit

import pytest

from tests.runtime.text.test_worker import FOREVER, is_alive, workers
from tests.server.serving import started, until

GOOD = {"model": "toy", "prompt": "a", "max_tokens": 4, "temperature": 0}
PROPERTIES = {f"name{i}": {"type": "string"} for i in range(10_000)}
PATTERN = {"type": "string", "pattern": "^" + "(ab|cd)?" * 50_000 + "$"}


@pytest.fixture(scope="module")
def served(toy):
    with started(toy, "--models", 2, "--drain", 2, "--name", "toy") as (_, address):
        yield address


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def ask(address, body, path="/v1/completions"):
    """The status and the answer, and how long it took."""
    start = time.monotonic()
    connection = send(address, body, path)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return *found, time.monotonic() - start


def send(address, body, path="/v1/completions"):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection


def state(address):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    connection.request("GET", "/health")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_a_grammar_that_never_ends_is_answered_in_time(served):
    status, answer, seconds = ask(served, {**GOOD, "grammar": FOREVER})
    assert (status, answer["error"]["param"]) == (400, "grammar")
    assert "too much time or memory" in answer["error"]["message"]
    assert seconds < 20
    # A client that set a limit gets the text so far, as with any text.
    body = {**GOOD, "grammar": FOREVER, "max_seconds": 0.5}
    status, answer, seconds = ask(served, body)
    choice = answer["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "", "length")
    assert seconds < 3
    assert ask(served, {**GOOD, "regex": "yes"})[1]["choices"][0]["text"] == "yes"


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("completions", {"regex": "a" * 64_001}, "regex"),
        ("completions", {"json_schema": PATTERN}, "json_schema"),
        ("completions", {"json_schema": json.dumps(PATTERN)}, "json_schema"),
        ("completions", {"json_schema": {"properties": PROPERTIES}}, "json_schema"),
        ("chat/completions", {"tools": [tool({"properties": PROPERTIES})]}, "tools"),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"properties": PROPERTIES}},
                }
            },
            "response_format",
        ),
    ],
)
def test_schemas_and_tools_have_the_limit_of_grammars(served, path, more, param):
    body = {"messages": [{"role": "user", "content": "a"}], **GOOD, **more}
    del body["messages" if path == "completions" else "prompt"]
    status, answer, seconds = ask(served, body, f"/v1/{path}")
    assert (status, answer["error"]["param"]) == (400, param)
    assert "longer than" in answer["error"]["message"]
    assert seconds < 2


def test_tools_that_take_too_long_are_refused(served):
    pattern = {"type": "string", "pattern": "^(.*a.{30}){30}(.*b.{30}){99}$"}
    slow = tool({"type": "object", "properties": {"a": pattern}, "required": ["a"]})
    body = {**GOOD, "tools": [slow] * 100, "tool_choice": "required"}
    body["messages"] = [{"role": "user", "content": "a"}]
    del body["prompt"]
    status, answer, seconds = ask(served, body, "/v1/chat/completions")
    assert status == 400, answer
    assert answer["error"]["message"]
    assert seconds < 12


def test_a_client_that_leaves_frees_the_model(served):
    connection = send(served, {**GOOD, "grammar": FOREVER})
    until(lambda: state(served)["generating"] == 1, 5)
    time.sleep(0.5)
    connection.close()
    until(lambda: state(served)["generating"] == 0, 2)


def test_sigterm_ends_a_compilation(toy):
    with started(toy, "--drain", 1, "--name", "toy") as (process, address):
        assert ask(address, {**GOOD, "regex": "yes"})[0] == 200
        until(lambda: len(workers({process.pid})) == 1, 5)  # it waits for texts
        connection = send(address, {**GOOD, "grammar": FOREVER})
        until(lambda: len(workers({process.pid})) == 2, 5)
        left = workers({process.pid})
        process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        process.wait(8)
        assert time.monotonic() - start < 3
        connection.close()
        until(lambda: not any(map(is_alive, left)), 2)
