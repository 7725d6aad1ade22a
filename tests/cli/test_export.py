import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from optimum.commands import optimum_cli

from jetdraft.bundle import Bundle
from jetdraft.cli import console
from jetdraft.cli.console import ProgressBars
from jetdraft.cli.export import command
from jetdraft.export import measures
from jetdraft.quant.choice import KL_BOUND
from jetdraft.recipe import FAST_DEFAULTS, RUNGS, Recipe
from jetdraft.testing import toy_bundle
from tests import cases
from tests.programs import assert_refused, ended, jetdraft, several, succeed, without
from tests.tiny import VOCAB_SIZE, save_checkpoint


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs" / "bundle"


@pytest.fixture
def nothing_written(output: Path):
    yield
    assert os.listdir(output.parent) == []


def test_export_makes_a_bundle_that_generates(pair, output):
    flags = ("--drafter", pair.drafter, "--quantize=int4", "--block-size=32")
    sizes = ("--capacity=64", "--max-width=16")
    result = succeed("export", pair.drafter, *flags, *sizes, "-o", output)
    assert result.stdout == ""
    made = Bundle.open(output)
    assert list(made.graphs) == ["target", "drafter"]
    assert Recipe.from_json(made.target.quantization) == Recipe("int4", 32)
    assert made.target.contract.capacity == 64
    assert made.target.contract.max_width == 16
    assert result.stderr.splitlines()[0].endswith(
        "MB, 64 tokens of context, methods none, lookup, draft, trigram, cascade"
    )
    assert result.stderr.splitlines()[1:] == ["target: int4-rtn-b32", "drafter: q8_0"]
    succeed("generate", output, "-p", " the", "-n", "4", "-t", "1")


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    output = tmp_path_factory.mktemp("measured") / "bundle"
    small = "--max-width=4096"  # more than the capacity: narrowed to it
    result = succeed("export", pair.drafter, "-o", output, "--capacity=64", small)
    return Bundle.open(output), result


def test_defaults_are_those_of_the_help(measured):
    opened, result = measured
    entry = opened.target
    assert entry.contract.dtype == "float32"
    assert entry.contract.max_width == 64
    recipe, kl = Recipe.from_json(entry.quantization), entry.quantization["kl"]
    assert recipe.name == RUNGS["jetdraft"][-1] or kl <= KL_BOUND
    said = result.stderr.splitlines()[-1]
    assert said == f"target: {recipe.name}, KL {kl:.2g}", "measured by default"


def test_no_library_writes_to_the_terminal(pair, tmp_path):
    """transformers warns of what it renames, onnxruntime of a home like a service's."""
    texts = tmp_path / "texts.txt"
    texts.write_text("def f(self):\n    return self.x\n" * 60)
    short = ["--steps=1", "--batch-size=2", "--sequence-length=32", "--data", texts]
    verbs = [
        ["export", pair.drafter, "--capacity=64"],
        ["train", "forecast", pair.target, *short],
        ["train", "draft", pair.target, *short, "--regenerate"],
    ]
    verbs = [[*verb, "-o", tmp_path / str(n)] for n, verb in enumerate(verbs)]
    env = {n: v for n, v in os.environ.items() if n != "CI"} | {"HOME": "/proc/none"}
    done = ended(*several(*verbs), env=env)
    ours = r"after \d+ s: |code 0|step \d|target: [iq]|"
    ours += r"training (\d+ weights|a drafter)|"
    lines = [line for line in done.stderr.splitlines() if line]
    assert not [n for n in lines if not re.match(f"{ours}{tmp_path}/", n)]
    assert [line.split()[0] for line in lines if line.startswith(str(tmp_path))] == [
        f"{tmp_path / str(number)}:" for number in range(3)
    ]
    assert done.stdout == ""


@pytest.mark.parametrize("device", [(), ("--device", "orin-nano-4gb")])
def test_fast_measures_nothing(pair, output, monkeypatch, device):
    monkeypatch.delattr(measures, "sample_text")
    drafter = ("--drafter", pair.drafter, "--capacity=64", *device)
    result = jetdraft("export", pair.drafter, "-o", output, "--fast", *drafter)
    assert result.stderr.splitlines()[-2:] == [
        f"target: {FAST_DEFAULTS['jetdraft']}",
        "drafter: q8_0",
    ]


def mamba(folder: Path) -> Path:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1}
    return save_checkpoint(folder, transformers.MambaConfig(**sizes))


@pytest.fixture(scope="module")
def others(pair, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("others")
    (folder / "empty").mkdir()
    toy_bundle(folder / "bundle")
    (folder / "file").write_text("")
    mamba(folder / "mamba")
    return {"target": pair.target, "drafter": pair.drafter, "tmp": folder}


@cases(
    "line, said",
    ("{tmp}/nothing", ["no checkpoint at"]),
    ("{tmp}/empty", ["has no config.json"]),
    ("{tmp}/bundle", ["{tmp}/bundle is a bundle already; give the checkpoint"]),
    ("{tmp}/mamba", ["has recurrent layers", "see docs/models.md"]),
    ("{target} --drafter {tmp}/nothing", ["no checkpoint at", "nothing"]),
    ("{target} --drafter {tmp}/mamba", ["{tmp}/mamba has recurrent layers"]),
    ("{target} --drafter ''", []),
    ("{target} --head ''", []),
    ("{target} --quantize-drafter ''", []),
    ("{drafter} -o {tmp}/file/bundle", ["choose another"]),
    ("{target} --quantize int4-gptq --calibration {tmp}/file", ["0 tokens"]),
)
@pytest.mark.usefixtures("nothing_written")
def test_what_cannot_be_exported_is_refused(others, output, line, said):
    words = [word.format(**others) for word in shlex.split(line)]
    result = jetdraft("export", "-o", output, *words)
    assert_refused(result, *(part.format(**others) for part in said))


@cases(
    "flag",
    *("--capacity=0", "--capacity=15", "--capacity=2000000", "--capacity=many"),
    *("--max-width=1", "--block-size=48", "--quantize=int3", "--dtype=bf16"),
    *("--provider=abacus", "--provider=tensorrt --flavour=contrib"),
    *("--provider=cuda --dtype=fp32", "--flavour=standard --quantize=int4-hqq"),
    *("--flavour=standard --quantize=int4-head2", "--quantize=int4-best"),
    *("--drafter-provider=cuda --dtype=fp32", "--fast --max-kl=0.1"),
    *("--fast --quantize=int4-gptq", "--fast --quantize=int8-kv8"),
    *("--fast --quantize-drafter=int4-gptq", "--fast --draft-vocab=100"),
    "--colour=red",
)
@pytest.mark.usefixtures("nothing_written")
def test_option_out_of_range(pair, output, flag):
    result = jetdraft("export", pair.target, "-o", output, *flag.split())
    assert_refused(result)
    assert result.stderr.count("\n") == 1
    assert ("a fast export" in result.stderr) == ("--fast" in flag)


def test_no_output(pair):
    assert_refused(jetdraft("export", pair.target), "--output")


@cases(
    "given, expected",
    (("--device", "orin-nano-4gb"), "int4-gptq-b128"),
    (("--block-size", "64"), "int4-rtn-b64-head8"),
    (("--max-kl", "9"), "q4_k-headq6_k"),
    (("--max-kl", "9", "--kernel", "onnxruntime"), "int4-gptq-b128-head8"),
    (("--quantize", "int4-gptq-b32"), "int4-gptq-b32"),
)
def test_other_defaults_need_no_text_either(pair, output, given, expected):
    succeed("export", pair.drafter, "-o", output, "--capacity=64", *given)
    assert expected in jetdraft("check", "--no-run", output).stdout


def test_without_torch_the_extra_is_named(pair, output):
    done = without("torch", "export", pair.target, "-o", output)
    assert done.returncode == 2
    assert done.stderr.startswith("error: exporting needs torch; pip install")
    assert done.stderr.count("\n") == 1
    assert not output.exists()


def test_without_a_terminal_long_steps_print_lines_and_their_end(monkeypatch, capsys):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.02)
    printed, until = "", time.monotonic() + 60
    with ProgressBars() as bars:
        for step, lines in (("measure layers", 2, 30), 2), (("trace target", 0, 1), 1):
            bars(*step)
            while printed.count(step[0]) < lines and time.monotonic() < until:
                time.sleep(0.02)
                printed += capsys.readouterr().err
        bars("trace target", 1, 1)
        bars("quantize target", 0, 9)
    printed += capsys.readouterr().err
    first, second, *_ = printed.splitlines()
    assert re.fullmatch(r"after \d+ s: measure layers, 2 of 30", first)
    assert second.endswith("s: measure layers, 2 of 30")
    begun, ended = r"^after \d+ s: trace target$", r"^after \d+ s: trace target, done$"
    assert re.search(begun, printed, re.MULTILINE), "not 0 of 1"
    assert re.search(ended, printed, re.MULTILINE)


def test_a_short_command_prints_no_line(capsys):
    with ProgressBars() as bars:
        bars("measure layers", 2, 30)
    assert capsys.readouterr().err == ""


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
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def contents(folder: Path) -> dict[str, bytes]:
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
    # The drafter is quicker to export; a refusal below shows that --drafter is passed.
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
    again = jetdraft("export", *bad.split(), pair.target, "-o", tmp_path / "bundle")
    assert refused == (again.exit_code, again.stdout, again.stderr)
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
