"""Earlier requests and their responses, kept on this machine to draft from.

One SQLite file with permissions 0600, since it holds what users wrote. Entries belong
to a user and are bounded in number and age. They only ever become drafts: a wrong or
poisoned one costs time, never text.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jetdraft.errors import StoreError
from jetdraft.runtime.history.similarity import Vector

MOST_ENTRIES = 256
MOST_DAYS = 30.0
MOST_TOKENS = 8192
"""Of a request and its response together; longer ones are not kept."""

_DAY = 86400.0
_APPLICATION = 0x4A444654
"""Written into the file's header, so that no other program's database is touched."""
_ID_AT = 68
"""Where SQLite's file header has it."""

_TABLES = """
create table if not exists about (tokenizer text not null);
create table if not exists entries (
    id integer primary key, user text not null, used real not null,
    prompt blob not null, response blob not null, vector blob not null
);
create index if not exists entries_of_user on entries (user, used);
"""


@dataclass(frozen=True)
class Entry:
    """A request, its response (token ids), and where the request points to.

    `vector` is float32 [d] of unit length, or empty; `used` in seconds since 1970.
    """

    prompt: list[int]
    response: list[int]
    vector: Vector
    used: float = 0.0
    id: int = 0


class ResponseStore:
    """What one user asked and was answered; token ids of one tokenizer.

    Raises `StoreError` if the file belongs to another tokenizer or program, or cannot
    be made. A damaged store is moved aside with a warning, and a new one is begun.

        store = ResponseStore(Path("said.sqlite"), tokenizer="<sha256>", user="ann")
        store.add(Entry([5, 8], [9, 2], vector))
        store.entries[0].response    # the latest first
    """

    def __init__(
        self,
        file: Path,
        tokenizer: str,
        user: str = "",
        vocab_size: int = 1 << 32,
        most_entries: int = MOST_ENTRIES,
        most_days: float = MOST_DAYS,
    ) -> None:
        if not user.isprintable():
            raise StoreError(f"user {user!r} is no printable name; choose another")
        self.file = file
        self.user = user
        self.most_entries = most_entries
        self.most_days = most_days
        self._most_token = vocab_size - 1
        self._tokenizer = tokenizer
        self.entries = self._begin(tokenizer)

    def _begin(self, tokenizer: str) -> list[Entry]:
        try:
            return self._take(tokenizer)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if _is_out_of_reach(error) or not _is_ours(self.file):
                raise StoreError(
                    f"cannot use the store {self.file} ({error}); choose another file"
                ) from error
            aside = _moved_aside(self.file)
            warnings.warn(
                f"the store {self.file} is damaged; it was moved to {aside} and a new "
                "one is begun",
                stacklevel=3,
            )
        return self._take(tokenizer)

    def _take(self, tokenizer: str) -> list[Entry]:
        """Make the file, or find that it is ours and this tokenizer's; its entries."""
        _prepare(self.file)
        if self._owner(tokenizer) != tokenizer:
            raise StoreError(
                f"the store {self.file} belongs to another tokenizer; choose another "
                "file"
            )
        self.file.chmod(0o600)
        self._forget_old()
        return self._read()

    def _owner(self, tokenizer: str) -> str:
        """The tokenizer of the file; `tokenizer` if it is new."""
        with self._open() as database:
            [(check,)] = database.execute("pragma quick_check(1)").fetchall()
            if check != "ok":
                raise sqlite3.DatabaseError(check)
            database.execute(f"pragma application_id = {_APPLICATION}")
            database.executescript(_TABLES)
            # In one statement: another process may be making it too.
            database.execute(
                "insert into about select ? where not exists (select 1 from about)",
                (tokenizer,),
            )
            [(known,)] = database.execute("select tokenizer from about limit 1")
            return str(known)

    def _forget_old(self) -> None:
        """Entries of all users that are too old."""
        with self._open() as database:
            oldest = time.time() - self.most_days * _DAY
            database.execute("delete from entries where used < ?", (oldest,))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=2.0)) as database, database:
            database.execute("pragma secure_delete = on")
            yield database

    def _read(self) -> list[Entry]:
        oldest = time.time() - self.most_days * _DAY
        with self._open() as database:
            rows = database.execute(
                "select id, used, prompt, response, vector from entries"
                " where user = ? and used >= ? order by used desc limit ?",
                (self.user, oldest, self.most_entries),
            ).fetchall()
        found = (_entry(*row) for row in rows)
        return [each for each in found if each and self._is_in_vocabulary(each)]

    def _is_in_vocabulary(self, entry: Entry) -> bool:
        """Whether a drafter could read it: a poisoned one must not stop anything."""
        return max([*entry.prompt, *entry.response], default=0) <= self._most_token

    def add(self, entry: Entry) -> None:
        """Keep an entry instead of those with the same request, and drop old ones.

        Where that fails, as on a full disk, decoding goes on with a warning.
        """
        length = len(entry.prompt) + len(entry.response)
        if not entry.response or length > MOST_TOKENS:
            return
        try:
            self._insert(entry)
            self.entries = self._read()
        except (sqlite3.Error, StoreError) as error:
            warnings.warn(
                f"the response could not be kept in {self.file} ({error})", stacklevel=2
            )

    def _insert(self, entry: Entry) -> None:
        if not self.file.exists() or not self.file.stat().st_size:
            self._take(self._tokenizer)  # somebody has removed it
        prompt = _blob(entry.prompt)
        now = time.time()
        with self._open() as database:
            known = database.execute(
                "select response from entries where user = ? and prompt = ?",
                (self.user, prompt),
            ).fetchone()
            response = _blob(entry.response)
            longer = known and isinstance(known[0], bytes)
            if longer and known[0].startswith(response):
                response = known[0]  # a shorter run of the same says nothing new
            database.execute(
                "delete from entries where user = ? and prompt = ?", (self.user, prompt)
            )
            oldest = now - self.most_days * _DAY
            database.execute("delete from entries where used < ?", (oldest,))
            database.execute(
                "insert into entries (user, used, prompt, response, vector)"
                " values (?, ?, ?, ?, ?)",
                (
                    self.user,
                    now,
                    prompt,
                    response,
                    entry.vector.astype(np.float32).tobytes(),
                ),
            )
            database.execute(
                "delete from entries where user = ? and id not in (select id from"
                " entries where user = ? order by used desc, id desc limit ?)",
                (self.user, self.user, self.most_entries),
            )

    def clear(self) -> int:
        """Forget all that the user asked; how many entries that were."""
        try:
            with self._open() as database:
                deletion = "delete from entries where user = ?"
                count = database.execute(deletion, (self.user,)).rowcount
        except sqlite3.Error as error:
            raise StoreError(
                f"cannot clear the store {self.file} ({error}); try again"
            ) from error
        self.entries = []
        return count


def _prepare(file: Path) -> None:
    """Make the file, for its owner's eyes only; refuse what is none of ours."""
    try:
        if not file.exists():
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        if not file.is_file() or not _is_ours(file):
            raise StoreError(
                f"{file} is something else than a store; choose another file"
            )
    except OSError as error:
        raise StoreError(
            f"cannot write the store {file} ({error.strerror}); choose another file"
        ) from error


def _is_ours(file: Path) -> bool:
    """Whether nothing of another program would be lost with it."""
    with file.open("rb") as opened:
        head = opened.read(_ID_AT + 4)
    marked = head[_ID_AT:] == _APPLICATION.to_bytes(4, "big")
    return marked or not head.strip(b"\0")


def _is_out_of_reach(error: Exception) -> bool:
    """Locked, read-only, or on a broken disk: not for us to mend."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    )


def _moved_aside(file: Path) -> Path:
    """Rename a file to a name that is free."""
    names = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    aside = next(
        free
        for end in names
        if not (free := file.with_name(f"{file.name}.damaged{end}")).exists()
    )
    with suppress(FileNotFoundError):  # another process may have been faster
        file.chmod(0o600)
        file.rename(aside)
    return aside


def _entry(
    key: int, used: float, prompt: bytes, response: bytes, vector: bytes
) -> Entry | None:
    """An entry, or None where a row is malformed."""
    try:
        return Entry(
            prompt=np.frombuffer(prompt, np.uint32).tolist(),
            response=np.frombuffer(response, np.uint32).tolist(),
            vector=np.frombuffer(vector, np.float32),
            used=used,
            id=key,
        )
    except (ValueError, TypeError):
        return None


def _blob(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.uint32).tobytes()
