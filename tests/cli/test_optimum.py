"""optimum's own main, which must find our registration where it looks."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from optimum.commands import optimum_cli

from jetdraft.cli.export import command
from tests.cli.running import jetdraft

ROOT = Path(__file__).parents[2]

OTHER = """
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

class Other(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="other", help="")

    @staticmethod
    def parse_args(parser):
        parser.add_argument("--given")

    def run(self):
        print("other:", self.args.given)

REGISTER_COMMANDS = [(Other, ExportCommand)]
"""


@pytest.fixture
def export(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        given = ["optimum-cli", "export", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", given)
        code = 0
        try:
            optimum_cli.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def ended(result: Result) -> tuple[int, str, str]:
    return result.exit_code, result.stdout, result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a bundle; what was measured on this machine does not count."""
    files = (file for file in folder.iterdir() if file.is_file())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_has_the_options_of_jetdraft_export(export, flag):
    code, shown, _ = export("jetdraft", flag)
    assert code == 0
    usage, _, rest = shown.partition("\n")
    assert usage == "Usage: optimum-cli export jetdraft [OPTIONS] TARGET OUTPUT"
    options = {param.opts[-1] for param in command.params} - {"target", "--output"}
    assert len(options) > 10
    assert options <= set(rest.split())
    assert "--output" not in rest


def test_the_bundle_is_that_of_jetdraft_export(export, pair, tmp_path):
    given = ("--quantize=int8", "--block-size", 32)
    sizes = ("--capacity=64", "--max-width", 16)
    # One model is enough, and the drafter is the quicker one to export. A drafter that
    # is refused, below, shows that --drafter is passed on.
    code, *_ = export("jetdraft", *given, pair.drafter, tmp_path / "ours", *sizes)
    assert code == 0
    jetdraft("export", pair.drafter, "-o", tmp_path / "plain", *given, *sizes)
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


BAD = ["--quantize=int3", "--capacity=many", "--capacity 15", "--colour=red"]


@pytest.mark.parametrize("bad", [*BAD, "--drafter ./nothing"])
def test_bad_options_are_refused_as_by_jetdraft_export(export, pair, tmp_path, bad):
    refused = export("jetdraft", *bad.split(), pair.target, tmp_path / "bundle")
    code, shown, error = refused
    assert (code, shown) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    plain = ("export", *bad.split(), pair.target, "-o", tmp_path / "bundle")
    assert refused == ended(jetdraft(*plain))
    assert not (tmp_path / "bundle").exists()


def test_a_missing_argument_is_named(export):
    assert export("jetdraft") == (2, "", "error: Missing argument 'TARGET'.\n")
    _, _, error = export("jetdraft", "target")
    assert error == "error: Missing argument 'OUTPUT'.\n"


def test_commands_of_others_work_beside_it(export, monkeypatch, tmp_path):
    folder = tmp_path / "optimum" / "commands" / "register"
    folder.mkdir(parents=True)
    (folder / "register_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    _, listed, _ = export("--help")
    assert all(name in listed for name in ("jetdraft", "other"))
    assert export("other", "--given", 1) == (0, "other: 1\n", "")


def test_optimum_stays_a_namespace():
    assert not list((ROOT / "optimum").rglob("__init__.py"))


def test_listing_commands_does_not_import_jetdraft():
    code = (
        "import sys, optimum.commands.register.register_jetdraft\n"
        "sys.exit('jetdraft' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
