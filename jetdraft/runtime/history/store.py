"""Earlier requests and their responses, kept in a SQLite file to draft from."""

import sqlite3
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jetdraft.contracts.tensors import Float32s
from jetdraft.errors import BundleError, StoreError, refusing
from jetdraft.learning.store_file import StoreFile, check_user, entry_times

MAX_ENTRIES = 256
MAX_DAYS = 30.0
MAX_TOKENS = 8192  # Of a request with its response; longer ones are not kept.
MAX_USERS = 64  # The most users whose entries are kept in memory.
_MAX_BYTES = 4 * MAX_TOKENS

_TABLES = """
create table if not exists entries (
    id integer primary key, user text not null, used real not null,
    prompt blob not null, response blob not null, vector blob not null
);
create index if not exists entries_of_user on entries (user, used);
"""


@dataclass(frozen=True)
class Entry:
    """A request and its response; `vector` float32 [d] or [0], `used` in seconds."""

    prompt: list[int]
    response: list[int]
    vector: Float32s
    used: float = 0.0
    id: int = 0


class ResponseStore:
    """One user's earlier requests and responses, as token ids of one tokenizer.

    Raises `StoreError` if the file belongs to another tokenizer or program, or cannot
    be created. A damaged file is moved aside with a warning.
    """

    def __init__(
        self,
        file: Path,
        tokenizer: str,
        user: str = "",
        vocab_size: int = 1 << 32,
        most_entries: int = MAX_ENTRIES,
        most_days: float = MAX_DAYS,
    ) -> None:
        self.file, self.most_entries, self.most_days = file, most_entries, most_days
        self._most_token = vocab_size - 1
        self._store_file = StoreFile(file, tokenizer, _TABLES)
        self._by_user: dict[str, ResponseStore] = {user: self}
        self.user = check_user(user)
        self.entries: list[Entry] = []  # The user's, latest first.
        self.entries = self._store_file.open(self._read_entries)

    def of(self, user: str) -> "ResponseStore":
        """Return another user's store in the same file; raises `StoreError`."""
        if user not in self._by_user:
            store = copy(self)
            store.user, store.entries = check_user(user), []
            store.entries = self._store_file.open(store._read_entries)
            if len(self._by_user) == MAX_USERS:
                del self._by_user[next(iter(self._by_user))]
            self._by_user[user] = store
        self._by_user[user] = self._by_user.pop(user)  # the last to be dropped
        return self._by_user[user]

    def _read_entries(self) -> list[Entry]:
        """Read the entries of the user, after old entries of all users are deleted."""
        known = {(entry.id, entry.used): entry for entry in self.entries}
        times, entries = entry_times(self.most_days), list[Entry]()
        with self._store_file.connect() as database:
            deletion = "delete from entries where used not between ? and ?"
            database.execute(deletion, times)
            keys = database.execute(
                "select id, used from entries where user = ? and used between ? and ?"
                " and length(prompt) + length(response) <= ?"
                " order by used desc limit ?",
                (self.user, *times, _MAX_BYTES, self.most_entries),
            ).fetchall()
            for key in keys:
                entry = known.get(key)
                if entry is None:
                    query = "select prompt, response, vector from entries where id = ?"
                    row = database.execute(query, key[:1]).fetchone()
                    with suppress(ValueError, TypeError):  # of a poisoned file
                        texts = [np.frombuffer(ids, "u4").tolist() for ids in row[:2]]
                        vector = np.frombuffer(row[2], "f4")
                        entry = Entry(texts[0], texts[1], vector, key[1], key[0])
                # A drafter must be able to read it, also if it is poisoned.
                tokens = [*entry.prompt, *entry.response] if entry else []
                if entry and max(tokens, default=0) <= self._most_token:
                    entries.append(entry)
        return entries

    def add(self, entry: Entry) -> None:
        """Replace the request's earlier entry by this entry; a failure only warns."""
        length = len(entry.prompt) + len(entry.response)
        if not entry.response or length > MAX_TOKENS:
            return
        try:
            self._write_entry(entry)
            self.entries = self._read_entries()
        except (sqlite3.Error, StoreError) as error:
            fact = f"the response could not be kept in {self.file} ({error})"
            warnings.warn(fact, stacklevel=2)

    def _write_entry(self, entry: Entry) -> None:
        """Write an entry, drop the request's earlier entry; raises `sqlite3.Error`."""
        self._store_file.renew()
        texts = (entry.prompt, entry.response)
        prompt, response = (np.asarray(ids, np.uint32).tobytes() for ids in texts)
        key = self.user, prompt
        vector = entry.vector.astype(np.float32).tobytes()
        with self._store_file.connect() as database:
            query = "select response from entries where user = ? and prompt = ?"
            earlier = database.execute(query, key).fetchone()
            # Of the same response that was cut earlier, keep the longer text.
            if earlier and isinstance(earlier[0], bytes):
                response = earlier[0] if earlier[0].startswith(response) else response
            database.execute("delete from entries where user = ? and prompt = ?", key)
            database.execute(
                "insert into entries (user, used, prompt, response, vector)"
                " values (?, ?, ?, ?, ?)",
                (self.user, time.time(), prompt, response, vector),
            )
            database.execute(
                "delete from entries where user = ? and id not in (select id from"
                " entries where user = ? order by used desc, id desc limit ?)",
                (self.user, self.user, self.most_entries),
            )

    def clear(self) -> int:
        """Delete the user's entries and return their number; raises `StoreError`."""
        count = self._store_file.clear("entries", self.user)
        self.entries = []
        return count


class Similarity:
    """Embeds token ids as a unit vector.

    `BundleError` if the npy file, int8 or float [vocab, d], is damaged or has few rows.
    """

    def __init__(self, file: Path, vocab_size: int = 0) -> None:
        refusal = BundleError(f"{file} cannot be read; export the bundle again")
        with refusing(refusal, OSError, ValueError):
            self._table = np.lib.format.open_memmap(file, mode="r")
        is_matrix = self._table.ndim == 2 and self._table.dtype.kind in "fi"
        if not is_matrix or len(self._table) < vocab_size:
            raise refusal

    def vector(self, tokens: Sequence[int]) -> Float32s:
        """Embed tokens as float32 [d]: the direction of their mean, of unit length."""
        mean = self._table[np.asarray(tokens)].astype(np.float32).mean(0)
        vector: Float32s = mean / max(float(np.linalg.norm(mean)), 1e-9)
        return vector
