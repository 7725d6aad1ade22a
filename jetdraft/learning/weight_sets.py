"""The sets of a drafter's weights in a folder, and the choice between them.

A set is a folder with the arrays of a graph; its name is the hash of their file.
`choice.json` names the set that drafts. Sets and choice each appear in one step, so a
kill at any point leaves one whole set; several processes may share the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from jetdraft.bundle import DRAFTER, Bundle
from jetdraft.errors import JetdraftError, StoreError
from jetdraft.files import locked, read_arrays, write_text
from jetdraft.learning.lessons import LESSONS_FILE
from jetdraft.manifest import sha256_of
from jetdraft.parsing import Rule, read_json_file, read_record

ARRAYS = "arrays.npz"
"""The file of a set with its arrays, by their names in the graph."""

CHOICE_FILE = "choice.json"
"""The file that says which set drafts."""

OWN = ""
"""The name of the weights in the bundle."""

LEARNED_TYPES = ("float32", "float16", "uint8")
"""The types of learned arrays, floats and packed integers; indexes are not learned."""

PARTIAL = ".partial-"
"""The prefix of a set's folder while it is written."""

VERDICT_TOKENS = 256
"""The evaluated tokens that a verdict needs, with the old weights and with the new."""

EARLY_TOKENS = 64
"""Evaluated tokens after which a clear loss ends a trial."""

CLEAR_LOSS = 3.0
"""Standard errors by which worse weights go early: a false alarm in 1 of 700 looks. A
trial has several looks: with texts of 16 tokens one trial in 170 ends by chance."""

_HASH = re.compile("[0-9a-f]{64}")
Name = Annotated[
    str, Rule("a hash", lambda name: name == OWN or bool(_HASH.fullmatch(name)))
]


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
        try:
            if not file.is_file() or sha256_of(file) != name:  # a pipe never ends
                raise refusal
        except OSError as error:
            raise refusal from error
        arrays = read_arrays(file, refusal)
        for array in arrays.values():
            if array.dtype.name not in LEARNED_TYPES or not np.isfinite(array).all():
                raise refusal
        return arrays

    def change(self, change: Callable[[Choice], Choice | None]) -> None:
        """Replace the choice under a file lock, and delete unused sets.

        `change` gets the choice and returns the next one, or None to keep it; it may
        write sets too. Raises `OutputError` or `OSError`.
        """
        with locked(self.folder / "lock", wait=True, create=True):
            after = change(self.read_choice())
            if after is None:
                return
            write_text(self.folder / CHOICE_FILE, json.dumps(asdict(after)) + "\n")
            self._delete_unused({after.name, after.before})

    def settle(self, name: str, keep: bool) -> bool:
        """End the trial of a set; without `keep` the set before it drafts again.

        Returns False if it is not on trial, as when another process was faster. A
        failure only warns: decoding continues.
        """
        is_on_trial = False

        def settled(now: Choice) -> Choice | None:
            nonlocal is_on_trial
            if now.name != name or now.before is None:
                return None
            is_on_trial = True
            return replace(now, name=name if keep else now.before, before=None)

        try:
            self.change(settled)
        except (OSError, JetdraftError) as error:
            warnings.warn(f"no verdict on learned weights ({error})", stacklevel=2)
            return False
        return is_on_trial

    def clear(self) -> None:
        """Delete all sets; the bundle's own weights draft from now on."""
        self.change(lambda now: Choice(OWN, None, self.base, token_hex(16)))

    def _delete_unused(self, used: set[str | None]) -> None:
        """Delete sets that are not in `used`, and what killed processes have left."""
        for entry in self.folder.iterdir():
            is_set = entry.name.startswith(PARTIAL) or _HASH.fullmatch(entry.name)
            if is_set and entry.name not in used:
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.startswith(f"{CHOICE_FILE}."):
                entry.unlink(missing_ok=True)


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
    """Counts accepted and evaluated drafted tokens of the latest generations.

    Generations that are not needed for `VERDICT_TOKENS` evaluated tokens are dropped.
    """

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
        """Whether `VERDICT_TOKENS` were evaluated."""
        return self.evaluated >= VERDICT_TOKENS

    @property
    def rate(self) -> float:
        """The acceptance rate: accepted per evaluated token, 0.0 without any."""
        return self.accepted / max(1, self.evaluated)


def decide_trial(before: Tally, after: Tally) -> bool | None:
    """Whether to keep the weights of `after`; None while that is open.

    They go if their rate is lower: at `EARLY_TOKENS` if it is lower by `CLEAR_LOSS`
    standard errors of the difference, at `VERDICT_TOKENS` in any case. At a rate of one
    half the standard error is then 0.044: weights that are as good as before go every
    second time, and weights that are worse by that much stay one time in six.
    """
    if after.evaluated < EARLY_TOKENS:
        return None
    if after.is_full:
        return after.rate >= before.rate
    pooled = (before.accepted + after.accepted) / (before.evaluated + after.evaluated)
    variance = pooled * (1 - pooled) * (1 / before.evaluated + 1 / after.evaluated)
    loss = before.rate - after.rate
    return False if loss > CLEAR_LOSS * math.sqrt(variance) else None
