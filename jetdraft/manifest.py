"""The manifest of a bundle as a file: its version, and the hashes of other files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jetdraft.errors import BundleError

MANIFEST = "bundle.json"
SCHEMA_VERSION = 4


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest in a folder; raises `BundleError` if it cannot be read."""
    if not folder.is_dir():
        raise BundleError(f"no bundle at {folder}; make one with jetdraft export")
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["schema_version"]
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
            f"{folder} has bundle schema {version}, this jetdraft reads "
            f"{SCHEMA_VERSION}; {advice}"
        )
    return dict(manifest)


def check_file(file: Path, expected: dict[str, Any]) -> None:
    """Raise `BundleError` unless `file` has the `expected` bytes and sha256."""
    if not file.is_file():
        raise BundleError(f"{file} is missing; export the bundle again")
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise BundleError(
            f"{file} has {size} bytes instead of {expected['bytes']}; "
            "export or copy the bundle again"
        )
    if sha256_of(file) != expected["sha256"]:
        raise BundleError(
            f"{file} was altered (its sha256 differs); export or copy the bundle again"
        )


def sha256_of(file: Path) -> str:
    """The sha256 of a file, as hex digits."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
