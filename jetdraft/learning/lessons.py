"""What the target chose where drafts were wrong, kept on this machine to learn from.

The lessons lie in one SQLite file that only its owner can read; their number, size and
age are bounded. Source: Online Speculative Decoding (2310.07177).
"""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import StoreError, printable
from jetdraft.files import check_name
from jetdraft.learning.store_file import DAMAGE, StoreFile, check_user, entry_times

LESSONS_FILE = "lessons.sqlite"
"""The file of lessons in a folder."""

MAX_LESSONS = 256
"""The most lessons of one user."""

MAX_IN_ALL = 4096
"""The most lessons of all users."""
MAX_DAYS = 30.0
"""The days after which a lesson is deleted."""
MAX_TOKENS = 1024
"""The most tokens of a lesson; of a longer text the end is kept."""

MAX_PLACES = 128
"""The most wrong places of a lesson; of more the last are kept."""

CANDIDATES = 32
"""How many of the target's best tokens are kept of each place."""

_TABLES = """
create table if not exists lessons (
    id integer primary key, user text not null, kept real not null,
    tokens blob not null, places blob not null, ids blob not null, logits blob not null
);
create index if not exists lessons_of_user on lessons (user, kept);
"""


@dataclass(frozen=True)
class Lesson:
    """A text, and the target's candidates at the places where drafts were wrong.

    `tokens` int64 [n] are a prompt and its response, or their end. `places` int64 [w],
    from 1 on, are the indexes of the tokens that drafts missed. `ids` int64 [w, k] and
    `logits` float32 [w, k] are the target's candidates there.
    """

    tokens: Int64s
    places: Int64s
    ids: Int64s
    logits: Float32s

    def fits(self, vocab_size: int) -> bool:
        """Whether the parts have matching shapes, and all ids are in the vocabulary."""
        return bool(
            self.places.size
            and self.ids.size
            and self.logits.shape == self.ids.shape
            and self.places.min() > 0
            and self.places.max() < len(self.tokens)
            and max(self.tokens.max(), self.ids.max()) < vocab_size
            and np.isfinite(self.logits).all()
        )


class Lessons:
    """The lessons in a folder, as token ids of one tokenizer.

    Raises `StoreError` if the file belongs to another tokenizer or program, or cannot
    be created. A damaged file is moved aside with a warning and a new one is begun.
    """

    def __init__(self, folder: Path, tokenizer: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        try:
            check_name(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make the folder {printable(folder)} ({error.strerror}); "
                "choose another"
            ) from error
        self._file = StoreFile(folder / LESSONS_FILE, tokenizer, _TABLES)
        self._file.open()

    def add(self, lesson: Lesson, user: str = "") -> None:
        """Store a lesson of a user and delete old lessons; a failure only warns."""
        try:
            if self._file.is_missing():
                self._file.create_or_check()
            with self._file.connect() as database:
                _insert(database, lesson, check_user(user))
        except (*DAMAGE, OSError, StoreError) as error:
            warnings.warn(f"a lesson could not be kept ({error})", stacklevel=2)

    def read(self, user: str | None = None) -> list[Lesson]:
        """Return the lessons of a user, or of all users for None, latest first.

        Malformed rows are left out. Raises `StoreError`.
        """
        times = entry_times(MAX_DAYS)
        wanted = None if user is None else check_user(user)
        with self._connect() as database:
            rows = database.execute(
                "select tokens, places, ids, logits from lessons"
                " where kept between ? and ? and length(tokens) <= ? and"
                " length(places) <= ? and user = coalesce(?, user)"
                " order by kept desc, id desc limit ?",
                (*times, 4 * MAX_TOKENS, 4 * MAX_PLACES, wanted, MAX_IN_ALL),
            ).fetchall()
        return [lesson for row in rows for lesson in _parse_row(row, self._vocab_size)]

    def user_counts(self) -> dict[str, int]:
        """Return the number of lessons by user. Raises `StoreError`."""
        with self._connect() as database:
            rows = database.execute(
                "select user, count(*) from lessons"
                " where kept between ? and ? and typeof(user) = 'text'"
                " group by user order by user",
                entry_times(MAX_DAYS),
            )
            return dict(rows.fetchall())

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; damage in the block raises `StoreError`."""
        try:
            with self._file.connect() as database:
                yield database
        except DAMAGE as error:
            raise StoreError(
                f"cannot read {self._file.path} ({error}); clear it with jetdraft "
                "store clear"
            ) from error

    def clear(self, user: str = "") -> int:
        """Delete a user's lessons; returns their number. Raises `StoreError`."""
        return self._file.clear("lessons", check_user(user))


def _insert(database: sqlite3.Connection, lesson: Lesson, user: str) -> None:
    """Insert a lesson, then delete what is old or beyond the bounds."""
    parts = lesson.tokens, lesson.places, lesson.ids
    database.execute(
        "insert into lessons (user, kept, tokens, places, ids, logits)"
        " values (?, ?, ?, ?, ?, ?)",
        (
            *(user, time.time()),
            *(part.astype(np.uint32).tobytes() for part in parts),
            lesson.logits.astype(np.float32).tobytes(),
        ),
    )
    database.execute(
        "delete from lessons where kept not between ? and ?", entry_times(MAX_DAYS)
    )
    latest = "select id from lessons where user = ? order by kept desc, id desc limit ?"
    database.execute(
        f"delete from lessons where user = ? and id not in ({latest})",
        (user, user, MAX_LESSONS),
    )
    database.execute(
        "delete from lessons where id not in"
        " (select id from lessons order by kept desc, id desc limit ?)",
        (MAX_IN_ALL,),
    )


def _parse_row(row: tuple[bytes, ...], vocab_size: int) -> Iterator[Lesson]:
    """Yield the lesson in a row, or nothing for a malformed row."""
    try:
        tokens, places, ids = (
            np.frombuffer(blob, np.uint32).astype(np.int64) for blob in row[:3]
        )
        pairs = len(places), -1
        logits = np.frombuffer(row[3], np.float32).reshape(pairs)
        lesson = Lesson(tokens, places, ids.reshape(pairs), logits)
        if lesson.fits(vocab_size):
            yield lesson
    except (ValueError, TypeError):
        return
