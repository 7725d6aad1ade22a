"""Reads and writes files: texts, arrays, files that appear whole; and locks them."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from jetdraft.errors import DataError, JetdraftError, OutputError, as_error, refusing

TRIAL_FILE_BYTES = 4096  # An empty file may fit on a full disk.
MAX_BYTES = 1 << 28  # A device or a pipe may never end.


def check_name(file: Path) -> None:
    """Raise `OSError` for a path that no file can have: with a NUL or a surrogate."""
    refusal = OSError(errno.EINVAL, "no file can have this name")
    with refusing(refusal, UnicodeError):
        if b"\0" in os.fsencode(file):
            raise refusal


def is_free(folder: Path) -> bool:
    """Whether `folder` is an empty folder, or does not exist. Raises `OSError`."""
    return not any(folder.iterdir()) if folder.is_dir() else not folder.exists()


def check_writable(path: Path) -> None:
    """Raise `OutputError` unless a file or folder can be written at `path`."""
    fact, fix = f"cannot write {path}", "choose another place, or free some space"
    with as_error(OutputError, OSError, fact, fix):
        check_name(path)
        final = Path(os.path.realpath(path))
        above = next(folder for folder in final.parents if folder.exists())
        (above / f".{final.name}.partial-12345678").exists()  # is it too long?
        with TemporaryFile(dir=above) as file:
            file.write(bytes(TRIAL_FILE_BYTES))
            file.flush()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path, renamed to `file` when the block succeeds; raises `OSError`."""
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


@contextmanager
def _open_replacement(file: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `file` if the block succeeds; raises `OutputError`."""
    own = as_error(OutputError, OSError, f"cannot write {file}", "choose another file")
    with own, replacing(file) as partial, partial.open("wb") as handle:
        yield handle


def write_text(file: Path, text: str) -> None:
    """Write UTF-8 text to a file that appears whole. Raises `OutputError`."""
    with _open_replacement(file) as handle:
        handle.write(text.encode())


def write_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an npz that appears whole. Raises `OutputError`."""
    with _open_replacement(file) as handle:
        np.savez(handle, **arrays)


@contextmanager
def locked(path: Path, wait: bool = False, create: bool = False) -> Iterator[bool]:
    """Hold a lock on a folder, or on a file, until the block or the process ends.

    Yields whether the lock was free; with `wait` it waits. Raises `OSError`, or
    `OutputError` on a system without such locks.
    """
    fact = f"cannot lock {path}: this system has no file locks"
    with refusing(OutputError(f"{fact}; use jetdraft on Linux"), ImportError):
        import fcntl
    handle = os.open(path, os.O_CREAT | os.O_RDWR if create else os.O_RDONLY, 0o666)
    is_free = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_free = True
        yield is_free
    finally:
        os.close(handle)


Arrays = dict[str, npt.NDArray[Any]]


def read_arrays(file: Path, refusal: JetdraftError, *names: str) -> Arrays:
    """Read arrays of an uncompressed npz, all or `names`; raises `refusal`."""
    with (
        refusing(refusal, Exception),  # of a dozen types, from zipfile and numpy
        # numpy leaves files open that it cannot read, unless it was given a handle.
        file.open("rb") as handle,
        np.load(handle, allow_pickle=False) as stored,
    ):
        sizes = [entry.file_size for entry in stored.zip.infolist()]
        if sum(sizes) > file.stat().st_size:  # `write_arrays` compresses nothing
            raise ValueError("it is compressed")
        return {name: stored[name] for name in names or stored.files}


def read_array(file: Path, refusal: JetdraftError) -> npt.NDArray[Any]:
    """Read the array of an npy; raises `refusal` for any other file."""
    with refusing(refusal, Exception), file.open("rb") as handle:
        return np.lib.format.read_array(handle, allow_pickle=False)


def read_bytes(file: Path) -> bytes:
    """Read a file; raises `DataError` if it cannot be read or does not end."""
    missing = DataError(f"no data file {file}; give an existing file")
    with (
        as_error(DataError, OSError, f"cannot read {file}", "give a text file"),
        refusing(missing, FileNotFoundError),
        file.open("rb") as handle,
    ):
        data = handle.read() if file.is_file() else handle.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES and not file.is_file():
        raise DataError(f"{file} does not end; give a file")
    return data


def read_text(file: Path) -> str:
    """Read a UTF-8 file; raises `DataError` for any other file."""
    fact = f"{file} is not text"
    with as_error(DataError, UnicodeDecodeError, fact, "give UTF-8 text"):
        return read_bytes(file).decode("utf-8")
