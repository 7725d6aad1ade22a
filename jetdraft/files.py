"""Files that appear whole, and arrays in files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.errors import JetdraftError, OutputError

PROBE_BYTES = 4096
"""A full disk may still take an empty file."""


def check_name(file: Path) -> None:
    """Raise `OSError` for a name that no file can have, with a NUL or a surrogate.

    check_name(Path("a.npz"))
    """
    try:
        is_possible = b"\0" not in os.fsencode(file)
    except UnicodeError:
        is_possible = False
    if not is_possible:
        raise OSError(errno.EINVAL, "no file can have this name")


def is_free(folder: Path) -> bool:
    """Whether a path is an empty folder, or nothing is there. Raises `OSError`.

    is_free(Path("new"))
    """
    if folder.is_dir():
        return not any(folder.iterdir())
    return not folder.exists()


def check_place(path: Path) -> None:
    """Raise `OutputError` unless a file or folder can be written at `path`.

    It writes a file without a name beside it, or above missing folders.

    check_place(Path("new/table.npz"))
    """
    try:
        check_name(path)
        final = Path(os.path.realpath(path))
        above = next(folder for folder in final.parents if folder.exists())
        (above / f".{final.name}.partial-12345678").exists()  # is it too long?
        with TemporaryFile(dir=above) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        raise OutputError(
            f"cannot write {path} ({error.strerror}); choose another place, or free "
            "some space"
        ) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes `file` when the block succeeds.

    Raises `OSError`, for a pipe or a device in that place too.

    with replacing(Path("table.npz")) as partial:
        partial.write_bytes(b"...")
    """
    check_name(file)
    file = Path(os.path.realpath(file))  # a link stays a link
    if file.is_symlink():
        raise OSError(errno.ELOOP, "it is a link to itself")
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OSError(errno.EINVAL, "it is a pipe or a device")
    # Another process may be writing the same file.
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file, which appears whole. Raises `OutputError`.

    write_text(Path("report.json"), "{}")
    """
    try:
        with replacing(file) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write {file} ({error.strerror}); choose another file"
        ) from error


def write_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write an npz, which appears whole. Raises `OutputError`.

    write_arrays(Path("table.npz"), {"tokens": np.arange(3)})
    """
    try:
        with replacing(file) as partial, partial.open("wb") as handle:
            np.savez(handle, **arrays)
    except OSError as error:
        raise OutputError(
            f"cannot write {file} ({error.strerror}); choose another file"
        ) from error


def read_arrays(file: Path, refusal: JetdraftError) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an npz by name; raises `refusal` for any other file."""
    try:
        # numpy leaves files open that it cannot read, but not those of others.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
            sizes = [entry.file_size for entry in stored.zip.infolist()]
            if sum(sizes) > file.stat().st_size:  # nobody here compresses arrays
                raise ValueError("it is compressed")
            return {name: stored[name] for name in stored.files}
    except Exception as error:  # of a dozen types, from zipfile and numpy
        raise refusal from error


def read_array(file: Path, refusal: JetdraftError) -> npt.NDArray[Any]:
    """The array of an npy; raises `refusal` for any other file."""
    try:
        with file.open("rb") as handle:
            return np.lib.format.read_array(handle, allow_pickle=False)
    except Exception as error:  # of many types, from numpy
        raise refusal from error
