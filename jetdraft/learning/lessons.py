"""A folder to learn from use in: lessons in one SQLite file, and sets of weights.

A lesson is what the target chose where drafts were wrong (2310.07177). A set is a
folder with the arrays of a graph, named by their hash; `choice.json` names the set that
drafts. Sets and choice appear in one step; several processes may share the folder.
"""

import hashlib
import json
import math
import re
import shutil
import sqlite3
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.contracts.tensors import Float32s, Int64s
from jetdraft.errors import JetdraftError, StoreError, as_error, printable, refusing
from jetdraft.files import check_name, locked, read_arrays, write_text
from jetdraft.learning.store_file import DAMAGE, StoreFile, check_user, entry_times
from jetdraft.manifest import sha256_of
from jetdraft.parsing import Rule, read_json_file, read_record

LESSONS_FILE = "lessons.sqlite"  # The file of lessons in a folder.
MAX_LESSONS = 256  # The most lessons of one user.
MAX_IN_ALL = 4096  # The most lessons of all users.
MAX_DAYS = 30.0  # The days after which a lesson is deleted.
MAX_TOKENS = 1024  # The most tokens of a lesson; of a longer text the end is kept.
MAX_PLACES = 128  # The most wrong places of a lesson; of more the last are kept.
CANDIDATES = 32  # How many of the target's best tokens are kept of each place.
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
    be created. A damaged file is moved aside with a warning.
    """

    def __init__(self, folder: Path, tokenizer: str, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        fact = f"cannot make the folder {printable(folder)}"
        with as_error(StoreError, OSError, fact, "choose another"):
            check_name(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = StoreFile(folder / LESSONS_FILE, tokenizer, _TABLES)
        self._file.open(lambda: None)

    def add(self, lesson: Lesson, user: str = "") -> None:
        """Store a lesson of a user and delete old lessons; a failure only warns."""
        try:
            self._file.renew()
            with self._file.connect() as database:
                user = check_user(user)
                parts = lesson.tokens, lesson.places, lesson.ids
                blobs = [part.astype(np.uint32).tobytes() for part in parts]
                blobs.append(lesson.logits.astype(np.float32).tobytes())
                row = user, time.time(), *blobs
                columns = "user, kept, tokens, places, ids, logits"
                insertion = f"insert into lessons ({columns}) values"
                database.execute(f"{insertion} (?, ?, ?, ?, ?, ?)", row)
                times, delete = entry_times(MAX_DAYS), "delete from lessons where"
                database.execute(f"{delete} kept not between ? and ?", times)
                latest = "order by kept desc, id desc limit ?"
                kept = f"select id from lessons where user = ? {latest}"
                deletion = f"{delete} user = ? and id not in ({kept})"
                database.execute(deletion, (user, user, MAX_LESSONS))
                kept = f"select id from lessons {latest}"
                database.execute(f"{delete} id not in ({kept})", (MAX_IN_ALL,))
        except (*DAMAGE, OSError, StoreError) as error:
            warnings.warn(f"a lesson could not be kept ({error})", stacklevel=2)

    def read(self, user: str | None = None) -> list[Lesson]:
        """Return lessons of a user, or for None of all users, latest first."""
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
        fact = f"cannot read {self._file.path}"
        fix = "clear it with jetdraft store clear"
        with as_error(StoreError, DAMAGE, fact, fix), self._file.connect() as database:
            yield database

    def clear(self, user: str = "") -> int:
        """Delete a user's lessons; returns their number. Raises `StoreError`."""
        return self._file.clear("lessons", check_user(user))


def _parse_row(row: tuple[bytes, ...], vocab_size: int) -> Iterator[Lesson]:
    """Yield the lesson in a row, or nothing for a malformed row."""
    try:
        numbers = (np.frombuffer(blob, np.uint32) for blob in row[:3])
        tokens, places, ids = (array.astype(np.int64) for array in numbers)
        pairs = len(places), -1
        logits = np.frombuffer(row[3], np.float32).reshape(pairs)
        lesson = Lesson(tokens, places, ids.reshape(pairs), logits)
        if lesson.fits(vocab_size):
            yield lesson
    except (ValueError, TypeError):
        return


ARRAYS = "arrays.npz"  # The file of a set with its arrays, by their names in the graph.
CHOICE_FILE = "choice.json"  # The file that says which set drafts.
OWN = ""  # The name of the weights in the bundle.
LEARNED_TYPES = ("float32", "float16", "uint8")  # Indexes are not learned.
PARTIAL = ".partial-"  # The prefix of a set's folder while it is written.
VERDICT_TOKENS = 256  # Evaluated with each of two sets before a verdict.
EARLY_TOKENS = 64  # Evaluated tokens after which a clear loss ends a trial.
# Standard errors by which worse weights go early: a false alarm in 1 of 700 looks.
CLEAR_LOSS = 3.0
_HASH = re.compile("[0-9a-f]{64}")
_IS_HASH = Rule("a hash", lambda name: name == OWN or bool(_HASH.fullmatch(name)))
Name = Annotated[str, _IS_HASH]


@dataclass(frozen=True)
class Choice:
    """The set `name` that drafts for the drafter `base`; "" is the bundle's weights.

    It is on trial if there is a set `before`, which a lost trial restores. Each clear
    draws a new `cleared`: a training that began before it publishes nothing.
    """

    name: Name
    before: Name | None
    base: Name
    cleared: str = ""


class WeightSets:
    """The sets of weights in a folder, for the drafter with the hash `base`."""

    def __init__(self, folder: Path, base: str) -> None:
        self.folder, self.base = folder, base

    def check(self) -> None:
        """Raise `StoreError` if the folder's sets belong to another drafter."""
        if self._read_file().base != self.base:
            raise StoreError(
                f"{self.folder} holds weights of another drafter; choose another "
                "folder, or clear it with jetdraft store clear"
            )

    def read_choice(self) -> Choice:
        """Read the choice; another drafter's choice reads as the bundle's weights."""
        choice = self._read_file()
        if choice.base == self.base:
            return choice
        return replace(choice, name=OWN, before=None, base=self.base)

    def _read_file(self) -> Choice:
        """Read the choice in the file; a missing or malformed file chooses no set."""
        try:
            fields = read_json_file(self.folder / CHOICE_FILE)
            choice: Choice = read_record(Choice, fields)
        except (OSError, ValueError):
            return Choice(OWN, None, self.base)
        # A set against itself would be a trial without a rate before it.
        return replace(choice, before=None) if choice.name == choice.before else choice

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Read the arrays of a set, {} for the bundle's own; raises `StoreError`."""
        if name == OWN:
            return {}
        file = self.folder / name / ARRAYS
        refusal = StoreError(f"the learned weights in {file} are damaged or missing")
        with refusing(refusal, OSError):
            if not file.is_file() or sha256_of(file) != name:  # a pipe never ends
                raise refusal
        arrays = read_arrays(file, refusal)
        for array in arrays.values():
            if array.dtype.name not in LEARNED_TYPES or not np.isfinite(array).all():
                raise refusal
        return arrays

    def change(self, change: Callable[[Choice], Choice | None]) -> bool:
        """Replace the choice under a file lock, and delete unused sets.

        `change` returns the next choice, or None to keep it; it may write sets too.
        Returns whether it gave one. Raises `OutputError` or `OSError`.
        """
        with locked(self.folder / "lock", wait=True, create=True):
            after = change(self.read_choice())
            if after is None:
                return False
            write_text(self.folder / CHOICE_FILE, json.dumps(asdict(after)) + "\n")
            for entry in self.folder.iterdir():  # also what killed processes have left
                name = entry.name
                is_set = name.startswith(PARTIAL) or _HASH.fullmatch(name)
                if is_set and name not in (after.name, after.before):
                    shutil.rmtree(entry, ignore_errors=True)
                elif name.startswith(f"{CHOICE_FILE}."):
                    entry.unlink(missing_ok=True)
            return True

    def settle(self, name: str, keep: bool) -> bool:
        """End the trial of a set; without `keep` the set before it drafts again.

        Returns False if another process was faster. A failure only warns.
        """

        def settled(now: Choice) -> Choice | None:
            if now.name != name or now.before is None:
                return None
            return replace(now, name=name if keep else now.before, before=None)

        try:
            return self.change(settled)
        except (OSError, JetdraftError) as error:
            warnings.warn(f"no verdict on learned weights ({error})", stacklevel=2)
            return False

    def clear(self) -> None:
        """Delete all sets; the bundle's own weights draft from now on."""
        self.change(lambda now: Choice(OWN, None, self.base, token_hex(16)))


def label(name: str) -> str:
    """Return what a message calls a set."""
    return f"the learned set {name[:12]}" if name else "the bundle's own drafter"


def has_learned(folder: Path) -> bool:
    """Whether a folder has lessons or a choice, as after learning from use."""
    return (folder / LESSONS_FILE).is_file() or (folder / CHOICE_FILE).is_file()


def drafter_sha256(bundle: Bundle) -> str:
    """A hash of the drafter's graphs and weights in a bundle, in hex digits."""
    files = sorted(n for n in bundle.files if n.startswith(f"{DRAFTER}.onnx"))
    hashes = " ".join(bundle.files[name]["sha256"] for name in files)
    return hashlib.sha256(hashes.encode()).hexdigest()


class Tally:
    """Counts drafted tokens of the latest generations, up to `VERDICT_TOKENS`."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque()
        self.accepted = self.evaluated = 0

    def add(self, accepted: int, evaluated: int) -> None:
        """Add the counts of a generation, and drop old generations."""
        self._counts.append((accepted, evaluated))
        self.accepted += accepted
        self.evaluated += evaluated
        while self.evaluated - self._counts[0][1] >= VERDICT_TOKENS:
            accepted, evaluated = self._counts.popleft()
            self.accepted -= accepted
            self.evaluated -= evaluated

    @property
    def is_full(self) -> bool:
        return self.evaluated >= VERDICT_TOKENS

    @property
    def rate(self) -> float:
        """The acceptance rate: accepted per evaluated token, 0.0 without any."""
        return self.accepted / max(1, self.evaluated)


def judge_trial(before: Tally, after: Tally) -> bool | None:
    """Whether to keep the weights of `after`; None while that is open.

    They go if their rate is lower: at `EARLY_TOKENS` by `CLEAR_LOSS` standard errors of
    the difference, at `VERDICT_TOKENS` in any case.
    """
    if after.evaluated < EARLY_TOKENS:
        return None
    if after.is_full:
        return after.rate >= before.rate
    pooled = (before.accepted + after.accepted) / (before.evaluated + after.evaluated)
    variance = pooled * (1 - pooled) * (1 / before.evaluated + 1 / after.evaluated)
    loss = before.rate - after.rate
    return False if loss > CLEAR_LOSS * math.sqrt(variance) else None
