"""Creates, checks and, if damaged, replaces the SQLite files of users' texts."""

import itertools
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import TypeVar

from jetdraft.errors import StoreError, as_error, printable
from jetdraft.files import check_name

T = TypeVar("T")
DAMAGE = (sqlite3.Error, UnicodeDecodeError)  # What a damaged file raises.
_APPLICATION_ID = 0x4A444654  # In the file's header, unlike other databases.
_ID_OFFSET = 68  # The byte of the file's header where SQLite keeps the application id.
_DAMAGED_SUFFIX = ".damaged"  # Ends a damaged file's name; a number may follow.
_ABOUT_TABLE = "create table if not exists about (tokenizer text not null);"

_SECONDS_PER_DAY = 86400.0
_NEVER = 1e11  # In the year 5138; texts and blobs are larger for SQLite.


class StoreFile:
    """A SQLite file of one tokenizer's token ids, which only its owner can read.

    `tables` is the SQL that makes its tables, if they are missing.

        file = StoreFile(Path("said.sqlite"), tokenizer="<sha256>", tables=TABLES)
        file.create_or_check()
        with file.connect() as database: ...
    """

    def __init__(self, path: Path, tokenizer: str, tables: str) -> None:
        self.path, self.tokenizer = path, tokenizer
        self._tables = _ABOUT_TABLE + tables

    def create_or_check(self) -> None:
        """Create the file, or check that it is whole and for this tokenizer.

        Raises `StoreError` if that fails, and one of `DAMAGE` if it cannot be read.
        """
        path, fact = self.path, f"cannot write the store {printable(self.path)}"
        with as_error(StoreError, OSError, fact, "choose another file"):
            check_name(path)
            if not path.exists():  # its owner alone can read it
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            if not path.is_file() or not _is_ours(path):
                fact = f"{path} is not a store of responses"
                raise StoreError(f"{fact}; choose another file")
        with self.connect() as database:
            [(verdict,)] = database.execute("pragma quick_check(1)").fetchall()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            database.execute(f"pragma application_id = {_APPLICATION_ID}")
            database.executescript(self._tables)
            # One statement, since another process may be creating the file too.
            new = "insert into about select ? where not exists (select 1 from about)"
            database.execute(new, (self.tokenizer,))
            [(owner,)] = database.execute("select tokenizer from about limit 1")
            if owner != self.tokenizer:
                fact = f"the store {self.path} belongs to another tokenizer"
                raise StoreError(f"{fact}; choose another file")
        self.path.chmod(0o600)

    def open(self, read: Callable[[], T]) -> T:
        """Create or check the file and `read` it; a damaged file is replaced."""
        try:
            self.create_or_check()
            return read()
        except DAMAGE as error:
            self._move_damaged(error)
        self.create_or_check()
        return read()

    @contextmanager
    def connect(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; the block is one transaction. Raises `sqlite3.Error`."""
        with closing(sqlite3.connect(self.path, timeout=2.0)) as database, database:
            database.execute("pragma secure_delete = on")
            yield database

    def renew(self) -> None:
        """Create the file again if it was deleted or emptied, as `create_or_check`."""
        if not self.path.exists() or not self.path.stat().st_size:
            self.create_or_check()

    def _move_damaged(self, error: Exception) -> None:
        """Move the file aside with a warning; `StoreError` unless `error` is damage."""
        # Locked, read-only, or on a full or broken disk.
        names = "BUSY", "LOCKED", "PERM", "READONLY", "IOERR", "FULL", "CANTOPEN"
        codes = [getattr(sqlite3, f"SQLITE_{name}") for name in names]
        is_inaccessible = getattr(error, "sqlite_errorcode", 0) & 0xFF in codes
        if is_inaccessible or not _is_ours(self.path):
            fact = f"cannot use the store {self.path} ({error})"
            raise StoreError(f"{fact}; choose another file") from error
        warnings.warn(
            f"the store {self.path} is damaged; it was moved to "
            f"{_move_aside(self.path)} and a new store is begun",
            stacklevel=4,
        )

    def clear(self, table: str, user: str) -> int:
        """Delete a user's rows of a table, and damaged files; returns the rows' number.

        Raises `StoreError`.
        """
        fact = f"cannot clear {self.path}"
        with as_error(StoreError, (*DAMAGE, OSError), fact, "try again"):
            with self.connect() as database:
                deletion = f"delete from {table} where user = ?"
                count = database.execute(deletion, (user,)).rowcount
            for numbers in ("", "-*"):
                names = f"{escape(self.path.name)}{_DAMAGED_SUFFIX}{numbers}"
                for file in self.path.parent.glob(names):
                    file.unlink(missing_ok=True)
        return count


def entry_times(most_days: float) -> tuple[float, float]:
    """Return the earliest and latest time of a valid entry, in seconds since 1970."""
    return time.time() - most_days * _SECONDS_PER_DAY, _NEVER


def check_user(user: str) -> str:
    """Return the name of a user; raises `StoreError` if it is not printable."""
    if not user.isprintable():
        fact = f"user {user!r} has unprintable characters"
        raise StoreError(f"{fact}; choose another name")
    return user


def _is_ours(path: Path) -> bool:
    """Whether the file has jetdraft's application id, or is empty or all zeros."""
    with path.open("rb") as handle:
        header = handle.read(_ID_OFFSET + 4)
        if header[_ID_OFFSET:] == _APPLICATION_ID.to_bytes(4, "big"):
            return True
        parts = iter(partial(handle.read, 1 << 20), b"")
        return not any(part.strip(b"\0") for part in itertools.chain([header], parts))


def _move_aside(path: Path) -> Path:
    """Rename a file to a name that no file has; returns the new path."""
    suffixes = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    name = f"{path.name}{_DAMAGED_SUFFIX}"
    places = (path.with_name(f"{name}{suffix}") for suffix in suffixes)
    aside = next(place for place in places if not place.exists())
    with suppress(FileNotFoundError):  # another process may have been faster
        path.chmod(0o600)
        path.rename(aside)
    return aside
