import json
import os
import shutil

import pytest

from jetdraft.server.app import Service
from jetdraft.server.http_server import open_unix_listener
from tests.programs import ROOT, ended, printed
from tests.server.conftest import LIMITS
from tests.server.serving import served, until

SOURCE = ROOT / "examples" / "cpp" / "client.cpp"
PROMPT = 'The "robot" sees\n'


def builds():
    command = "c++", "-fsyntax-only", "-include", "curl/curl.h", "-x", "c++", "-"
    return shutil.which("c++") and not ended(*command, input="").returncode


pytestmark = pytest.mark.skipif(
    not os.environ.get("JETDRAFT_NEEDS_CURL") and not builds(),
    reason="no C++ compiler, or no headers of libcurl",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    program = tmp_path_factory.mktemp("cpp") / "client"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    printed("c++", *flags, SOURCE, "-lcurl", "-o", program)
    return program


@pytest.fixture(scope="module", params=["tcp", "uds"])
def door(request, service, tmp_path_factory):
    """A service, and the arguments before and after the prompt that lead to it."""
    path = tmp_path_factory.mktemp("socket") / "s"
    own = Service(service.pool, "toy", LIMITS)
    with open_unix_listener(path) as listener, served(own, listener) as address:
        if request.param == "tcp":
            yield own, address, []
        else:
            yield own, "http://localhost", ["--uds", str(path)]


def run(program, door, *words):
    _, address, more = door
    done = ended(program, address, PROMPT, *more, *words, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_text_comes_whole_or_as_it_is_written(program, door, model):
    expected = model.generate(PROMPT, max_new_tokens=64).text
    [answer] = run(program, door)
    assert answer["choices"][0]["text"] == expected
    events = run(program, door, "--stream")
    assert len(events) > 2
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_who_closes_the_connection_ends_the_text(program, door, slow):
    service = door[0]
    before = service.desk.total.new_tokens
    assert len(run(program, door, "--cancel", "2")) == 2
    until(lambda: service.desk.generating == 0)
    assert service.desk.total.new_tokens - before < 64


def test_a_refusal_is_an_error(program, door):
    _, address, more = door
    done = ended(program, address, "a" * 100_000, *more, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["param"] is None  # the body is too long
