"""The programs in examples/, run as a user would: what they print is what they say."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest

import jetdraft
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.server.http_server import END_SECONDS
from tests.programs import ended, module_of, printed

EXAMPLES = Path(__file__).parent.parent / "examples"
UNIT = EXAMPLES.parent / "deploy" / "jetson" / "jetdraft.service"
KEY = "a-key-of-this-test"


def run(name, *arguments):
    """The lines that an example prints."""
    return printed(
        sys.executable, EXAMPLES / name, *arguments, timeout=500
    ).splitlines()


@pytest.fixture
def robot(monkeypatch):
    return module_of("examples/robot.py", monkeypatch)


@pytest.fixture
def agent(monkeypatch):
    return module_of("examples/agent.py", monkeypatch)


def test_every_example_is_in_the_table():
    table = (EXAMPLES / "README.md").read_text()
    for example in [*EXAMPLES.glob("*.py"), *filter(Path.is_dir, EXAMPLES.iterdir())]:
        if not example.name.startswith((".", "_")):
            assert f"`{example.name}" in table, example


def test_embed_shows_the_text_and_what_was_drafted(toy):
    with jetdraft.load(toy) as model:
        plain = model.generate("A man", max_new_tokens=64, method="none")
    *said, marks, summary = run("embed.py", toy, "A man")
    assert "\n".join(said) == "A man" + plain.text
    assert len(plain.text) > 20
    assert len(marks) == len(plain.token_ids)
    assert set(marks) <= {"+", "."}
    drafted = f"{marks.count('+')} of {len(marks)} tokens"
    assert summary == f"{drafted} had been drafted"


def test_embed_needs_no_arguments():
    assert run("embed.py")[0].startswith("The robot sees ")


def drive(robot, *arguments):
    """Who decided in each tick, and the last line.

    Ticks are numbered without a gap. Every action is one: the model's, of its schema,
    or else STOP.
    """
    *lines, summary = run("robot.py", *arguments)
    found = [re.fullmatch(r"tick (\d+) (\w+): (.*)", line) for line in lines]
    assert [int(match[1]) for match in found] == list(range(len(lines)))
    for _, by, action in map(re.Match.groups, found):
        jsonschema.validate(json.loads(action), robot.SCHEMA)
        assert by == "model" or json.loads(action) == robot.STOP, by
    return [match[2] for match in found], summary


def test_a_robot_in_real_time_acts_once_a_tick(robot):
    deciders, summary = drive(robot, "--ticks", 5, "--period", 0.1)
    assert len(deciders) == 5
    assert "decided by" in summary


def test_a_robot_with_time_is_led_by_the_model_until_it_hits_a_wall(toy, robot):
    """A simulated clock, and so much time that no pause of the machine matters."""
    deciders, summary = drive(robot, toy, "--simulate", "--period", 1e5)
    expected = ["model"] * 8
    expected[robot.WALL] = "bumper"
    assert deciders == expected
    # The bumper did not only overrule the model, it ended what was being said.
    assert summary.endswith("texts ended by {'stop': 7, 'cancelled': 1}")


def test_a_robot_without_time_stops(robot):
    deciders, summary = drive(robot, "--ticks", 4, "--period", 1e-9)
    assert len(deciders) == 4
    assert "model" not in deciders
    assert "'stop'" not in summary


def test_a_robot_does_not_wait_for_a_pass_that_never_ends(toy, robot, monkeypatch):
    choose, free = Chooser.choose, threading.Event()
    monkeypatch.setattr(
        Chooser, "choose", lambda *given: [free.wait(300), choose(*given)][1]
    )

    async def main(model):
        free.set()  # to warm up
        driven = robot.Robot(robot.Brain(model, 1e5), 0.02)
        free.clear()
        driving = asyncio.create_task(driven.run(robot.WALL))
        while len(driven.decisions) < robot.WALL:
            await asyncio.sleep(0.01)
        free.set()
        await driving
        return driven

    with jetdraft.load(toy, threads=1) as model:
        driven = asyncio.run(main(model))
    assert [made.by for made in driven.decisions] == ["late", "busy", "busy"]
    assert driven.brain.ends == {"stop": 1}


def costs(lines):
    """Tokens and passes of each round."""
    found = (re.match(r"  (\d+) tokens in (\d+) passes: ", line) for line in lines)
    return [(int(match[1]), int(match[2])) for match in found if match]


def test_an_agent_recalls_what_it_did_before(toy, tmp_path):
    store = tmp_path / "said.sqlite"
    lines = run("agent.py", toy, "--store", store)
    first, *later = costs(lines)
    assert len(later) == 2
    assert first[0] > 90
    for tokens, passes in later:
        assert passes / tokens < first[1] / first[0] / 2
    # A second run begins with what the first one left.
    again, *_ = costs(run("agent.py", toy, "--store", store))
    assert again[0] == first[0]
    assert again[1] < first[1] / 2


def test_an_agent_calls_the_tools_that_there_are(toy, agent, capsys):
    lines = run("agent.py", toy)
    calls = [line for line in lines if " -> " in line]
    assert len(calls) == agent.ROUNDS * len(agent.REQUESTS)
    for line in calls:
        call = json.loads(re.search(r"(\{\"name.*) -> ", line)[1])
        jsonschema.validate(call, agent.CALL)
    first = next(line for line in calls if "battery" in line)
    assert first.endswith('{"sensor": "battery"}} -> {"battery": 81}')


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ({"name": "add", "arguments": {"a": 3, "b": 4}}, {"sum": 7}),
        ({"name": "read_sensor", "arguments": {"sensor": "light"}}, {"light": 41}),
        ({"name": "clock", "arguments": {}}, None),
    ],
)
def test_the_tools_of_the_agent_work(agent, call, found):
    jsonschema.validate(call, agent.CALL)
    used = agent.Agent(None)._use(call)
    assert used == found or re.fullmatch(r"\d\d:\d\d", used["time"])


def unit(name):
    """The values of a setting of the unit."""
    text = UNIT.read_text().replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def started_by_the_unit(toy):
    """The command line of ExecStart with what is on this machine in it."""
    [line] = unit("ExecStart")
    program, verb, bundle, *options = line.split()
    assert (Path(program).name, verb) == ("jetdraft", "serve")
    assert bundle.startswith("/opt/jetdraft/bundles/")
    options[options.index("--port") + 1] = "0"
    return [sys.executable, "-m", "jetdraft", verb, str(toy), *options]


@contextmanager
def serving(command):
    """A process of the unit's command, and its address."""
    environment = {**os.environ, "JETDRAFT_API_KEY": KEY}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stderr.readline()
            found = re.search(r"mine answers at (http://127\.0\.0\.1:\d+)$", line)
            assert found, line + process.stderr.read()
            yield process, found[1]
        finally:
            process.kill()


def ask(address, path, key=""):
    """A status and what was answered."""
    request = urllib.request.Request(address + path)
    request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def test_the_units_command_serves_with_its_key_and_ends_well(toy):
    with serving(started_by_the_unit(toy)) as (process, address):
        assert ask(address, "/health")[0] == 200
        assert ask(address, "/v1/models")[0] == 401
        status, models = ask(address, "/v1/models", KEY)
        assert (status, models["data"][0]["id"]) == (200, "mine")
        process.send_signal(signal.SIGTERM)
        # Restart=on-failure must not bring back what was ended.
        assert process.wait(300) == 0


def test_the_unit_gives_texts_time_to_end_and_keeps_to_loopback():
    [command], [stop], [environment] = map(
        unit, ("ExecStart", "TimeoutStopSec", "EnvironmentFile")
    )
    assert int(stop) > int(re.search(r"--drain (\d+)", command)[1]) + END_SECONDS
    assert unit("Type") == ["notify"]
    assert int(unit("WatchdogSec")[0]) >= 30  # a pass over a long prompt takes its time
    assert "--host 127.0.0.1 " in command
    assert "--api-key" not in command  # anyone can read a command line
    assert not environment.startswith("-")
    assert unit("DynamicUser") == ["yes"]
    assert unit("IPAddressDeny") == ["any"]
    assert unit("MemoryMax")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path):
    program = unit("ExecStart")[0].split()[0]
    installed = tmp_path / UNIT.name
    installed.write_text(UNIT.read_text().replace(program, sys.executable))
    done = ended("systemd-analyze", "verify", "--man=no", installed, timeout=300)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
