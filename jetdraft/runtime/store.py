"""Earlier requests and their responses, kept on this machine to draft from.

One SQLite file with permissions 0600, since it holds what users wrote. Entries belong
to a user and are bounded in number and age. They only ever become drafts: a wrong or
poisoned one costs time, never text.
"""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jetdraft.errors import StoreError
from jetdraft.runtime.similarity import Vector

MOST_ENTRIES = 256
MOST_DAYS = 30.0
MOST_TOKENS = 8192
"""Of a request and its response together; longer ones are not kept."""

_DAY = 86400.0
_APPLICATION = 0x4A444654
"""Written into the file's header, so that no other program's database is touched."""

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

    Raises `StoreError` if the file belongs to another tokenizer or cannot be made. A
    damaged file is moved aside with a warning, and a new one is begun.

        store = ResponseStore(Path("said.sqlite"), tokenizer="<sha256>", user="ann")
        store.add(Entry([5, 8], [9, 2], vector))
        store.entries[0].response    # the latest first
    """

    def __init__(
        self,
        file: Path,
        tokenizer: str,
        user: str = "",
        most_entries: int = MOST_ENTRIES,
        most_days: float = MOST_DAYS,
    ) -> None:
        self.file = file
        self.user = user
        self.most_entries = most_entries
        self.most_days = most_days
        self._begin(tokenizer)
        self.entries = self._read()

    def _begin(self, tokenizer: str) -> None:
        try:
            _prepare(self.file)
            found = self._owner(tokenizer)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(
                    f"cannot use the store {self.file} ({error}); choose another file"
                ) from error
            aside = self.file.with_name(f"{self.file.name}.damaged")
            self.file.replace(aside)
            warnings.warn(
                f"the store {self.file} is damaged; it was moved to {aside} and a new "
                "one is begun",
                stacklevel=3,
            )
            _prepare(self.file)
            found = self._owner(tokenizer)
        if found != tokenizer:
            raise StoreError(
                f"the store {self.file} belongs to another tokenizer; choose another "
                "file"
            )

    def _owner(self, tokenizer: str) -> str:
        """The tokenizer of the file; `tokenizer` if it is new."""
        with self._open() as database:
            [(kind,)] = database.execute("pragma application_id").fetchall()
            [(tables,)] = database.execute("select count(*) from sqlite_master")
            if tables and kind != _APPLICATION:
                raise StoreError(
                    f"{self.file} is a database of something else; choose another file"
                )
            [(check,)] = database.execute("pragma quick_check(1)").fetchall()
            if check != "ok":
                raise sqlite3.DatabaseError(check)
            database.execute(f"pragma application_id = {_APPLICATION}")
            database.executescript(_TABLES)
            known = database.execute("select tokenizer from about").fetchone()
            if known is None:
                database.execute("insert into about values (?)", (tokenizer,))
            return tokenizer if known is None else str(known[0])

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, timeout=2.0)) as database, database:
            yield database

    def _read(self) -> list[Entry]:
        oldest = time.time() - self.most_days * _DAY
        with self._open() as database:
            rows = database.execute(
                "select id, used, prompt, response, vector from entries"
                " where user = ? and used >= ? order by used desc limit ?",
                (self.user, oldest, self.most_entries),
            ).fetchall()
        return [
            Entry(
                prompt=np.frombuffer(prompt, np.uint32).tolist(),
                response=np.frombuffer(response, np.uint32).tolist(),
                vector=np.frombuffer(vector, np.float32),
                used=used,
                id=key,
            )
            for key, used, prompt, response, vector in rows
        ]

    def add(self, entry: Entry) -> None:
        """Keep an entry instead of those with the same request, and drop old ones.

        Where that fails, as on a full disk, decoding goes on with a warning.
        """
        if len(entry.prompt) + len(entry.response) > MOST_TOKENS:
            return
        try:
            self._insert(entry)
            self.entries = self._read()
        except sqlite3.Error as error:
            warnings.warn(
                f"the response could not be kept in {self.file} ({error})", stacklevel=2
            )

    def _insert(self, entry: Entry) -> None:
        prompt = _blob(entry.prompt)
        now = time.time()
        with self._open() as database:
            database.execute(
                "delete from entries where user = ? and (prompt = ? or used < ?)",
                (self.user, prompt, now - self.most_days * _DAY),
            )
            database.execute(
                "insert into entries (user, used, prompt, response, vector)"
                " values (?, ?, ?, ?, ?)",
                (
                    self.user,
                    now,
                    prompt,
                    _blob(entry.response),
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
        with self._open() as database:
            database.execute("pragma secure_delete = on")
            done = database.execute("delete from entries where user = ?", (self.user,))
            count = done.rowcount
        self.entries = []
        return count


def _prepare(file: Path) -> None:
    """Make the file, for its owner's eyes only."""
    try:
        file.touch(mode=0o600)
        file.chmod(0o600)
    except OSError as error:
        raise StoreError(
            f"cannot write the store {file} ({error.strerror}); choose another file"
        ) from error


def _blob(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.uint32).tobytes()
