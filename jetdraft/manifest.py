"""The manifest of a bundle as a file: its version, and the hashes of other files."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from jetdraft.errors import BundleError
from jetdraft.files import replacing
from jetdraft.untrusted.json_text import read_json_file
from jetdraft.untrusted.printable import printable

MANIFEST = "bundle.json"
STAMPS = Path("profiles", "checked.json")
"""The hashes that were checked, with the sizes, inodes and times of the files."""

SCHEMA_VERSION = 6
VERSION, SEAL = "schema_version", "sha256"
"""The fields of a manifest with its schema, and with the hash of all others."""


def seal_of(manifest: dict[str, Any]) -> str:
    """The hash of a manifest's other fields, which shows an edit."""
    rest = {name: value for name, value in manifest.items() if name != SEAL}
    # Keys that are numbers are sorted as the text that they become in the file.
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder; raises `BundleError` if it cannot be read."""
    try:
        if not folder.is_dir():
            raise BundleError(f"no bundle at {folder}; make one with jetdraft export")
        manifest = dict(read_json_file(folder / MANIFEST))
        version = manifest[VERSION]
    except FileNotFoundError as error:
        raise BundleError(
            f"{folder} has no {MANIFEST}; make a bundle with jetdraft export"
        ) from error
    except OSError as error:
        raise BundleError(
            f"cannot read {folder / MANIFEST} ({error.strerror}); check its permissions"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{folder / MANIFEST} is damaged; export the bundle again"
        ) from error
    if version != SCHEMA_VERSION:
        advice = (
            "update jetdraft"
            if isinstance(version, int) and version > SCHEMA_VERSION
            else "export the bundle again"
        )
        raise BundleError(
            f"{folder} has bundle schema {printable(version, 20)}, this jetdraft reads "
            f"{SCHEMA_VERSION}; {advice}"
        )
    if manifest.get(SEAL) != seal_of(manifest):
        raise BundleError(
            f"{folder / MANIFEST} was altered (its sha256 differs); export or copy the "
            "bundle again"
        )
    return manifest


def check_files(folder: Path, files: dict[str, Any], again: bool = False) -> None:
    """Raise `BundleError` unless all files have the bytes and sha256 in `files`.

    To hash gigabytes takes as long as to load them. So a file is hashed once, and
    `again` only if its size, inode or times have changed since, or if `again` is true.
    """
    stamps = folder / STAMPS
    before = {} if again else _read_stamps(stamps)
    now = {}
    for name, expected in files.items():
        _check_size(folder / name, expected)
        status = (folder / name).stat()
        times = [status.st_mtime_ns, status.st_ctime_ns]
        now[name] = [expected["sha256"], status.st_size, status.st_ino, *times]
        if before.get(name) != now[name]:
            _check_hash(folder / name, expected)
    if now != before:
        # Without a writable folder the files are hashed at each load.
        with suppress(OSError):
            stamps.parent.mkdir(exist_ok=True)
            with replacing(stamps) as partial:
                partial.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")


def _read_stamps(file: Path) -> dict[str, Any]:
    try:
        return dict(read_json_file(file))
    except (OSError, ValueError, TypeError):
        return {}


def _check_size(file: Path, expected: dict[str, Any]) -> None:
    if not file.is_file():
        raise BundleError(f"{file} is missing; export the bundle again")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise BundleError(
            f"{file} has {size} bytes instead of {expected['bytes']}; "
            "export or copy the bundle again"
        )


def _check_hash(file: Path, expected: dict[str, Any]) -> None:
    if sha256_of(file) != expected["sha256"]:
        raise BundleError(
            f"{file} was altered (its sha256 differs); export or copy the bundle again"
        )


def sha256_of(file: Path) -> str:
    """The sha256 of a file, as hex digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
