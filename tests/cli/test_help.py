import errno
import inspect
import os
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict
from unittest.mock import Mock

import click
import onnxruntime
import pytest
from click.testing import CliRunner

import jetdraft as package
from jetdraft.cli import StandaloneCommand, main
from jetdraft.cli.command import GROUPS, Command, Option, option, record_flags
from jetdraft.cli.export import command as export_command
from jetdraft.cli.generate import command as generate
from jetdraft.devices.providers import installed_providers
from jetdraft.export.request import ExportRequest, export
from jetdraft.options import Flag, declared_options, takes
from jetdraft.ort import _MissingPackage
from jetdraft.runtime.planning.registry import methods
from tests import cases
from tests.programs import assert_refused, ended, jetdraft, python, succeed

VERBS = [
    *("export", "generate", "embed", "transcribe", "chat", "serve", "bench", "check"),
    *("tune", "plan", "doctor", "train", "store"),
]


def commands(command: click.Command, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(command, click.Group):
        yield path.strip(), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        yield from commands(command.get_command(context, name), f"{path} {name}")


COMMANDS = dict(commands(main))


def options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


@pytest.mark.parametrize("verb", [(), ("generate",), ("train", "draft")], ids=str)
def test_help_has_a_short_name(verb):
    assert succeed(*verb, "-h").stdout == succeed(*verb, "--help").stdout


def test_the_walk_reaches_every_command():
    assert {words.split()[0] for words in COMMANDS} == set(VERBS)
    trained = {words.split()[1] for words in COMMANDS if words.startswith("train")}
    methods_with_a_task = {name for name, method in methods().items() if method.task}
    assert trained == methods_with_a_task | {"acceptance", "use"}
    others = {"lookup", "recall", "cascade", "select"}
    assert set(methods()) - methods_with_a_task == others


def test_help_lists_the_verbs_in_the_order_of_use():
    _, _, listed = succeed("--help").stdout.partition("Commands:")
    assert [line.split()[0] for line in listed.splitlines() if line.strip()] == VERBS


def test_help_of_the_verbs_imports_none_of_them():
    code = (
        "import sys\n"
        "from jetdraft.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "verbs = [m for m in sys.modules if m.startswith('jetdraft.cli.')]\n"
        "verbs.remove('jetdraft.cli.command')\n"
        "assert not verbs, verbs\n"
        "assert 'torch' not in sys.modules"
    )
    python(code)


@pytest.mark.parametrize("words", COMMANDS)
def test_every_option_has_a_help_text_and_a_group(words):
    for param in options(COMMANDS[words]):
        assert isinstance(param, Option), param.name
        assert param.group in GROUPS, param.name
        assert param.help, param.name
        assert param.help.endswith("."), param.help


@pytest.mark.parametrize("words", COMMANDS)
def test_help_prints_each_option_once_under_its_group(words):
    result = succeed(*words.split(), "--help")
    section, shown = "", defaultdict(set)
    for line in result.stdout.splitlines():
        if line and not line.startswith(" ") and line.endswith(":"):
            section = line[:-1].lower()
        elif line.startswith("  -"):
            names = line.split("   ")[0].replace("/", " ").replace(",", " ").split()
            shown[section] |= {name for name in names if name.startswith("--")}
    for param in options(COMMANDS[words]):
        long = {name for name in param.opts if name.startswith("--")}
        places = [name for name, names in shown.items() if long <= names]
        assert places == ([] if param.hidden else [param.group]), param.name


def test_a_group_that_is_none_is_refused():
    with pytest.raises(ValueError, match="unknown group"):
        option("misc --x", "X.")


TWICE = {"-p": "embed", "--prompt": "embed", "--adapter": "export"}
"""Options that this verb takes several times, and others once."""


def test_no_long_option_means_two_things():
    meanings = defaultdict(lambda: defaultdict(list))
    for words, command in COMMANDS.items():
        for param in options(command):
            kind = "text" if param.type.name == "choice" else param.type.name
            kind = kind.removesuffix(" range")
            shorts = tuple(sorted(param.opts))
            meaning = (shorts, kind, param.is_flag, param.multiple, param.group)
            for name in param.opts:
                if TWICE.get(name) != words:
                    meanings[name][meaning].append(words)
    assert not {name: dict(ways) for name, ways in meanings.items() if len(ways) > 1}


FULL = "error: the disk is full; free some space\n"
REFUSED = "check its name and its permissions"
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_while_click_is_imported_is_one_line(tmp_path):
    (tmp_path / "click.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    done = ended(sys.executable, "-m", "jetdraft", "doctor", env=environment)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.fixture
def failing(monkeypatch):
    def run(error):
        monkeypatch.setattr("jetdraft.cli.doctor.examine", Mock(side_effect=error))
        return jetdraft("doctor")

    return run


@cases(
    "error, said",
    (OSError(errno.ENOSPC, "No space left on device"), FULL),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), FULL),
    (OSError(errno.EFBIG, "File too large"), FULL),
    # numpy's, of an array in an export
    (OSError("8192 requested and 0 written"), FULL),
    (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 500), REFUSED),
    (PermissionError(errno.EACCES, "Permission denied", "/root/a"), REFUSED),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), REFUSED),
)
def test_what_the_system_refuses_is_one_line(failing, error, said):
    assert_refused(failing(error), said)


@cases(
    "error", OSError("the header is missing"), OSError(errno.EBADF, "Bad descriptor")
)
def test_an_error_that_is_no_refusal_keeps_its_traceback(failing, error):
    assert failing(error).exception is error


def test_a_verb_runs_off_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(jetdraft("--version")))
    thread.start()
    thread.join(60)
    assert results[0].exit_code == 0, results[0].exception


def test_other_programs_keep_their_warnings():
    before = warnings.showwarning
    jetdraft("--version")
    assert warnings.showwarning is before


def test_generate_has_at_most_28_options():
    assert len(options(generate)) <= 28


@cases(
    "words, known",
    *((name, "export, generate") for name in ("inspect", "devices", "quantize")),
    ("train dream", "draft"),
    ("train dream", "acceptance, use"),
)
def test_an_unknown_command_is_told_the_known_commands(words, known):
    name = words.split()[-1]
    assert_refused(jetdraft(*words.split()), f"No such command '{name}'; choose", known)


def test_version_names_onnxruntime_and_its_providers_too():
    first, second, third = succeed("--version").stdout.splitlines()
    assert first == f"jetdraft {package.__version__}"
    assert second == f"onnxruntime {onnxruntime.__version__}"
    kind, _, names = third.partition(" ")
    assert (kind, names.split(", ")) == ("providers", installed_providers())
    assert names.endswith("cpu")


def test_version_is_printed_without_onnxruntime(monkeypatch):
    monkeypatch.setattr("jetdraft.devices.providers.ort", _MissingPackage())
    own, missing = succeed("--version").stdout.splitlines()
    assert own == f"jetdraft {package.__version__}"
    assert missing == "onnxruntime is not installed"


def test_a_run_is_ended_while_an_object_is_finalized():
    """Python ignores what a finalizer raises, so a signal in one would be lost."""
    code = """
import os, signal, time
from jetdraft.cli import _terminate

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        len("the handler runs before this")

signal.signal(signal.SIGTERM, _terminate)
Finalized()
time.sleep(30)
"""
    assert ended(sys.executable, "-c", code).returncode == 143


def test_a_cleanup_that_fails_does_not_hide_the_end_of_a_run():
    def end_badly():
        try:
            sys.exit(143)
        finally:
            raise KeyError

    with pytest.raises(SystemExit, match="143"):
        StandaloneCommand("ended", callback=end_badly).main([])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of every kind."""

    name: Annotated[str, Flag("runtime", "A name.")]
    size: Annotated[int, Flag("runtime", "A size.", least=1, most=9)] = 4
    share: Annotated[float | None, Flag("runtime", "A share.", above=0)] = None
    bits: Annotated[int | None, Flag("runtime", "Bits.", choices=(4, 8))] = None
    files: Annotated[tuple[Path, ...], Flag("runtime", "Files.")] = ()
    exact: Annotated[bool, Flag("runtime", "Exact.")] = True
    fast: Annotated[bool, Flag("runtime", "Fast.", names=("-f", "--fast"))] = False
    inner: int = 7


class Given(TypedDict, total=False):
    """Options that may be left out."""

    seed: Annotated[int | None, Flag("runtime", "A seed.")]
    other: int


def given(record, *words, **more):
    got = []

    @click.command("c", cls=Command)
    @record_flags("record", record, **more)
    def command(record):
        got.append(record)

    result = CliRunner().invoke(command, words)
    return got[0] if got else result.output


def test_flags_become_the_record():
    assert given(Settings, "--name", "a") == Settings(name="a")
    words = "--name a --size 9 --share 0.5 --bits 8 --files x --files y --no-exact -f"
    wanted = {"size": 9, "share": 0.5, "bits": 8, "exact": False, "fast": True}
    wanted |= {"files": (Path("x"), Path("y"))}
    assert given(Settings, *words.split()) == Settings(name="a", **wanted)
    assert given(Settings, only=("name",), name="b") == Settings(name="b")
    assert given(Given) == {}
    assert given(Given, "--seed", "3") == {"seed": 3}


WRONG = ("size 10", "size 0", "share 0", "bits 5", "inner 3")


@cases("words", "", *(f"--name a --{wrong}" for wrong in WRONG))
def test_wrong_flags_are_refused(words):
    assert "Error: " in given(Settings, *words.split())


def test_keywords_become_the_record():
    @takes(Settings)
    def show(settings: Settings) -> str:
        """Show it."""
        return f"{settings.name} {settings.size}"

    assert show(name="a", size=2) == "a 2"
    assert list(inspect.signature(show).parameters) == list(Settings.__annotations__)
    assert inspect.getdoc(show).startswith("Show it.\n\n- `name`: A name.\n- `size`")
    with pytest.raises(TypeError):
        show(nam="a")


def test_an_option_of_export_is_declared_once():
    names = {option.name for option in declared_options(ExportRequest)}
    flags = {param.name for param in export_command.params} - {"target", "output"}
    assert flags == names
    assert names < set(inspect.signature(package.export).parameters)
    assert all(f"- `{name}`: " in export.__doc__ for name in names)
    assert "Range('0 (greedy) to 100')" in str(inspect.signature(package.Sampling))
