"""Reads the text files that a model learns from, without torch."""

from __future__ import annotations

from pathlib import Path

from jetdraft.errors import DataError


def read_bytes(file: Path) -> bytes:
    """The bytes of a file; raises `DataError`."""
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"no data file {file}; give an existing file") from error
    except OSError as error:
        raise DataError(f"cannot read {file} ({error.strerror})") from error


def read_text(file: Path) -> str:
    """The text of a UTF-8 file; raises `DataError`."""
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not text ({error}); give UTF-8 text") from error
