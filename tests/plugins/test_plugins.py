import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

import jetdraft
from jetdraft import OptionError, methods
from jetdraft.cli import main
from jetdraft.methods import OWN, Method, Proposer, Rows, Traits, registered
from tests import cases
from tests.programs import ended

HERE = Path(__file__).parent
LINES = """
import json, sys
from click.testing import CliRunner
from jetdraft.cli import main
results = [CliRunner().invoke(main, line) for line in json.loads(sys.argv[1])]
names = "exit_code", "stdout", "stderr"
print(json.dumps([{n: getattr(result, n) for n in names} for result in results]))
"""
"""Runs command lines, one after the other; prints JSON."""

OF_TOY = ["none", "lookup", "draft", "trigram", "cascade"]
REFUSED = {
    "shape=best": (
        "unknown drafting option 'shape'; choose verifier, user, select-kv, top, "
        "tolerance, memory"
    ),
    "memory=many": "drafting option memory cannot be 'many'; give an integer",
    "memory=0": "memory 0 is too small; give 1 or more",
}
SAMPLINGS = [
    (),
    *(("--temperature", t, "--seed", seed) for t, seed in ((0.8, 1), (1.2, 2))),
]
LENGTHS = [1, 2, 4, None]
BROKEN = {
    "missing": ("import no_module_of_this_name", "cannot be loaded"),
    "raising": ("raise RuntimeError('two\\nlines')", "cannot be loaded (two lines)"),
    "silent": ("raise ValueError", "cannot be loaded (ValueError)"),
    "nameless": ("", "cannot be loaded"),
    "wrong": ("METHOD = 'again'", "wrong:METHOD is not a jetdraft.methods.Method"),
    "taken": (
        "from jetdraft.methods import Method\n"
        "METHOD = Method('lookup', 'another', lambda parts, options: None)",
        "there is a method 'lookup' already",
    ),
    "reserved": (
        "from jetdraft.methods import Method\n"
        "METHOD = Method('auto', 'another', lambda parts, options: None)",
        "cannot be loaded ('auto' cannot name a method",
    ),
}


def python(*arguments, beside=None):
    root = Path(jetdraft.__file__).parents[1]
    paths = [str(path) for path in (beside, root) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    how = {"env": environment, "cwd": beside, "timeout": 300}
    return ended(sys.executable, *arguments, **how)


def look(bundle, beside=None):
    run = python(HERE / "outside.py", bundle, beside=beside)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(HERE / "package", folder / "source")
    run = python(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--disable-pip-version-check", "--root-user-action", "ignore"),
        *("--target", folder / "packages", source),
    )
    assert run.returncode == 0, run.stderr
    return folder / "packages"


@pytest.fixture(scope="module")
def seen(installed, toy):
    return look(toy, installed)


def test_it_is_one_of_the_methods(seen):
    assert seen["methods"] == [*OWN, "again"]
    assert seen["of_model"] == [*OF_TOY, "again"]
    assert seen["warnings"] == []


def test_it_writes_the_text_of_plain_decoding_and_auto_may_pick_it(seen):
    assert len(seen["texts"]) == 12
    for same, length, drafted in seen["texts"]:
        assert same
        assert length is None or drafted > 10
    assert "again" in seen["lineup"]
    same, by_method = seen["auto"]
    assert same
    assert by_method["again"]["accepted_tokens"] > 20


@pytest.fixture(scope="module")
def lines(toy, installed):
    prompts = installed / "prompts.jsonl"
    prompts.write_text('{"prompt": "The robot sees"}\n')
    how = ("--raw", "-n", 32, "--ignore-eos", "--threads", 1, "--json", "--method")
    write = ("generate", toy, "-p", "The robot sees", *how)
    again = (*write, "again", "--drafting")
    lengths = {n: () if n is None else ("--num-draft-tokens", n) for n in LENGTHS}
    commands = {
        "help": ("generate", "--help"),
        **{way: (*write, "none", *way) for way in SAMPLINGS},
        **{
            (way, n): (*again, "memory=60", *way, *lengths[n])
            for way, n in product(SAMPLINGS, LENGTHS)
        },
        **{option: (*again, option) for option in REFUSED},
        "bench": (
            *("bench", toy, "--methods", "again", "--lengths", "2,4", "--repeats", 1),
            *("-n", 16, "--threads", 1, "--prompts", prompts, "--json"),
        ),
    }
    words = json.dumps([[str(word) for word in line] for line in commands.values()])
    run = python("-c", LINES, words, beside=installed)
    assert run.returncode == 0, run.stderr
    return dict(zip(commands, json.loads(run.stdout), strict=True))


def test_the_command_line_names_it(lines):
    assert "again" in lines["help"]["stdout"]
    assert "again" not in CliRunner().invoke(main, ["generate", "--help"]).stdout


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_command_line_generates_with_it(lines, sampling, length):
    answers = lines[sampling], lines[sampling, length]
    assert [answer["exit_code"] for answer in answers] == [0, 0], answers
    plain, drafted = (json.loads(answer["stdout"]) for answer in answers)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["method"] == "again"
    if length is not None:
        assert drafted["stats"]["by_method"]["again"]["drafted_tokens"] > 0


@pytest.mark.parametrize("drafting", REFUSED)
def test_an_option_that_cannot_be_ends_with_2(lines, drafting):
    refusal = f"error: {REFUSED[drafting]}\n"
    assert lines[drafting] == {"exit_code": 2, "stdout": "", "stderr": refusal}


def test_it_is_measured_beside_plain_decoding(lines):
    assert lines["bench"]["exit_code"] == 0, lines["bench"]["stderr"]
    every_row = json.loads(lines["bench"]["stdout"])["rows"]
    rows = [row for row in every_row if row["method"] == "again"]
    assert [row["num_draft_tokens"] for row in rows] == [2, 4, None]
    assert all(row["same_text"] == row["texts"] == 1 for row in rows)


class Rootless(Proposer):
    """Gives what a test tells it, which may lack the root."""

    traits = Traits("rootless", max_draft_tokens=4)

    def __init__(self, rows):
        self.rows = rows

    def propose(self, context, budget, parents=None):
        return self.rows(context[-1]) if callable(self.rows) else self.rows


OUTSIDE = "method 'rootless' proposes token {}, .*; ids are 0 to 383$"


@cases(
    "rows, line",
    *((rows, "method 'rootless'") for rows in (Rows.chain([5, 6]), Rows([], []))),
    *((rows, "method 'rootless'") for rows in (None, [5, 6])),
    (lambda root: Rows.chain([root, 6, -1]), OUTSIDE.format(-1)),
    (lambda root: Rows.chain([root, 6, 384]), OUTSIDE.format(384)),
)
def test_a_draft_without_the_root_or_of_no_token_is_refused(toy_model, rows, line):
    """Otherwise its first token would change the text."""
    method = Method("rootless", "no root", lambda parts, options: Rootless(rows))
    with registered(method), pytest.raises(OptionError, match=line):
        toy_model.generate("The robot", method="rootless", num_draft_tokens=2)


class Undeclared(methods.MethodOptions):
    memory: int = 64


class Foreign:
    memory: int = 64


@pytest.mark.parametrize("options", [Undeclared, Foreign])
def test_options_that_are_not_a_dataclass_are_refused(options):
    """Their fields would be no options."""
    name = options.__name__
    line = rf"^{name}, .* 'again', must be .*\) above class {name}\(MethodOptions\)$"
    with pytest.raises(OptionError, match=line):
        Method("again", "the last tokens", lambda parts, options: None, options)


def write_package(folder, name, code):
    """What pip leaves of a package: a module, and its metadata beside it."""
    (folder / f"{name}.py").write_text(f"{code}\n")
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (metadata / "METADATA").write_text(text)
    entry = f"[jetdraft.methods]\n{name} = {name}:METHOD\n"
    (metadata / "entry_points.txt").write_text(entry)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    for name, (code, _) in BROKEN.items():
        write_package(folder, name, code)
    code = (HERE / "package" / "jetdraft_again.py").read_text()
    write_package(folder, "works", code)
    return folder


def test_a_broken_package_is_left_out(broken, toy):
    seen = look(toy, broken)
    assert seen["methods"] == [*OWN, "again"]
    assert seen["of_model"] == [*OF_TOY, "again"]
    assert seen["plain"]
    assert all(same for same, *_ in seen["texts"])
    assert len(seen["warnings"]) == len(BROKEN)
    assert seen["kinds"] == ["UserWarning"]
    for name, (_, reason) in BROKEN.items():
        [line] = [line for line in seen["warnings"] if repr(name) in line]
        assert line.startswith(f"the entry point {name!r} of jetdraft.methods is left")
        assert reason in line
        assert "\n" not in line


def test_packages_are_loaded_when_methods_are_asked_for(broken):
    """So a package may import all of jetdraft, and jetdraft imports in a moment."""
    code = "import sys, jetdraft; print(sorted({'works', 'wrong'} & {*sys.modules}))"
    run = python("-W", "error", "-c", code, beside=broken)
    assert run.stdout == "[]\n", run.stderr


def test_the_command_line_warns_in_a_line_each(broken, toy):
    how = ("generate", toy, "-p", "a", "--raw", "-n", 2, "--threads", 1, "--method")
    run = python("-m", "jetdraft", *how, "lookup", "--json", beside=broken)
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines()
    warned = [line for line in lines if line.startswith("warning: the entry point")]
    assert len(warned) == len(BROKEN)
    assert json.loads(run.stdout)["stats"]["method"] == "lookup"
    refused = python("-m", "jetdraft", *how, "missing", beside=broken)
    assert refused.returncode == 2
    assert "unknown method 'missing'" in refused.stderr.splitlines()[-1]
