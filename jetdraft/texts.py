"""Reads the text files that a model learns from, without torch."""

from __future__ import annotations

from pathlib import Path

from jetdraft.errors import DataError

MOST_BYTES = 1 << 28
"""Of a device or a pipe, which may never end."""


def read_bytes(file: Path) -> bytes:
    """The bytes of a file; raises `DataError`."""
    try:
        with file.open("rb") as handle:
            data = handle.read() if file.is_file() else handle.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise DataError(f"no data file {file}; give an existing file") from error
    except OSError as error:
        raise DataError(
            f"cannot read {file} ({error.strerror}); give a text file"
        ) from error
    if len(data) > MOST_BYTES and not file.is_file():
        raise DataError(f"{file} does not end; give a file")
    return data


def read_text(file: Path) -> str:
    """The text of a UTF-8 file; raises `DataError`."""
    try:
        return read_bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not text ({error}); give UTF-8 text") from error
