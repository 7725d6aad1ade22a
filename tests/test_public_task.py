"""examples/tasks/public.py: a leaderboard's questions become prompts and calls."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.programs import module_of

TESTS = 60


@pytest.fixture
def public(monkeypatch):
    """The script as a module."""
    for name in ("make", "package"):  # which it finds by its own folders
        monkeypatch.delitem(sys.modules, name, raising=False)
    return module_of("examples/tasks/public.py", monkeypatch)


def function(name, required=("city",), **properties):
    properties = {"city": {"type": "string"}} | properties
    parameters = {"type": "dict", "properties": properties, "required": [*required]}
    words = f"Say what {name} says. It says\nmore."
    return {"name": name, "description": words, "parameters": parameters}


def record(number, text, functions, arguments):
    """A question and its answer, which calls the first of the functions."""
    messages = [{"role": "user", "content": text}]
    question = {"id": number, "question": [messages], "function": functions}
    answer = {"id": number, "ground_truth": [{functions[0]["name"]: arguments}]}
    return question, answer


def leaderboard(name):
    """Records of one set: thrice each function, and one that is long or wrong."""
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
    """pip writes a small wheel of the leaderboard."""

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
    """A folder whose tokenizer counts words and marks."""
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
    unseen = [name for name in called if name not in offered]
    assert len(unseen) == TESTS // 2
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


@pytest.mark.parametrize(
    ("possible", "arguments"),
    [
        ({"city": ["Rome"], "day": ["", "Monday"]}, {"city": "Rome"}),
        ({"city": ["Rome"], "day": ["Monday"]}, {"city": "Rome", "day": "Monday"}),
        ({"city": ["", "Rome"]}, {"city": "Rome"}),
        ({"city": [""]}, {"city": ""}),
        ({"city": []}, None),
        ({"day": ["Monday"]}, None),
        ({"city": ["Rome"], "hour": [1]}, None),
    ],
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
