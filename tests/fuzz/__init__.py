"""Attacks on jetdraft with drawn cases, by subject; scripts/fuzz runs them for long."""

import traceback
from abc import ABC, abstractmethod
from collections import Counter
from importlib import import_module
from pathlib import Path
from random import Random
from typing import ClassVar

# Cases that share what they leave behind; then a subject starts afresh.
BLOCK = 50


class Fault(AssertionError):
    """What must not be; any other exception out of a case is a fault too."""


class Subject(ABC):
    """Attacks one part of jetdraft; `folder` is its own, empty at the start.

    A `light` subject skips long preparation; `seconds` is the time after which a case
    counts as hanging, `unit` how many of its `things` a case tries.

        with SameText(folder) as subject:
            subject.run(Random("same-text:12345"))    # "same"
    """

    name: ClassVar[str]
    things: ClassVar[str] = "cases"
    unit: ClassVar[int] = 1
    seconds: ClassVar[float] = 60.0

    def __init__(self, folder: Path, light: bool = False) -> None:
        self.folder, self.light = folder, light
        self.facts: Counter[str] = Counter()
        """Counts beside the counts of outcomes, for the closing line."""

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {}

    @abstractmethod
    def run(self, draw: Random) -> str:
        """Try a case that `draw` decides; gives its outcome in a few words."""

    def refresh(self) -> None:
        """Forget what earlier cases left."""

    def finish(self) -> None:
        """Check what only shows after many cases; raises `Fault`."""

    def close(self) -> None:
        """Free everything."""

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Draw(Random):
    number = 0


def case(subject: type[Subject] | Subject, number: int) -> Draw:
    draw = Draw(f"{subject.name}:{number}")
    draw.number = number
    return draw


def place_of(error: BaseException) -> str:
    """An error's type and its deepest line in jetdraft, to tell faults apart."""
    if isinstance(error, Fault):
        return f"{' '.join(str(error).split())[:60]}..."
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/jetdraft/" in f.filename] or frames[-1:]
    where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {where}"


# Where the subjects are, by their names.
SUBJECTS = {
    "same-text": "tests.fuzz.same_text:SameText",
    "hybrids": "tests.fuzz.same_text:Hybrids",
    "mixtures": "tests.fuzz.same_text:Mixtures",
    "families": "tests.fuzz.same_text:Families",
    "bundles": "tests.fuzz.bundles:Bundles",
    "operators": "tests.fuzz.operators:Operators",
    "server": "tests.fuzz.serving:Serving",
    "faults": "tests.fuzz.faults:Faults",
    "soak": "tests.fuzz.soak:Soak",
}


def subject_named(name: str) -> type[Subject]:
    module, _, kind = SUBJECTS[name].partition(":")
    subject: type[Subject] = getattr(import_module(module), kind)
    return subject
