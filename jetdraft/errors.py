"""Everything jetdraft raises on purpose.

    JetdraftError
    ├── OptionError        an option cannot be used; `field` names it
    │   ├── DraftingError  its field is "drafting"
    │   ├── LengthError    a prompt is longer than the buffers
    │   └── ConstraintError  a constraint takes too much, or no text can follow
    ├── CheckpointError    a checkpoint cannot be read
    │   └── UnsupportedModelError   its architecture cannot be exported
    ├── PairError          target and drafter do not belong together
    ├── OutputError        the output folder cannot be written
    ├── BundleError        a bundle is missing, damaged or too new
    │   └── ContractError  a graph does not have the declared inputs and outputs
    ├── DeviceError        a device or its profile is unknown or malformed
    ├── ProviderError      this onnxruntime cannot run on the asked provider
    ├── StoreError         earlier responses or a table cannot be used
    ├── DataError          texts to train on are missing, malformed or too short
    ├── TrainingError      a training went wrong and was stopped
    └── CheckError         `jetdraft check` found a wrong text

A message states the fact and the fix in one line. The command line prints it and
ends with exit code 2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class JetdraftError(Exception):
    """Base of every error raised on purpose."""


class OptionError(JetdraftError):
    """An option cannot be used; `field` names it, for example "method" or "prompt"."""

    field = ""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field or self.field


class DraftingError(OptionError):
    """An option of drafting cannot be used."""

    field = "drafting"


class LengthError(OptionError):
    """A prompt is longer than the buffers of the bundle."""

    field = "prompt"


class ConstraintError(OptionError):
    """A constraint takes too much time or memory, or no text can follow it."""


class CheckpointError(JetdraftError):
    """A checkpoint cannot be read."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint's architecture cannot be exported."""

    @classmethod
    def of(cls, model: object, fact: str, fix: str = "see docs/models.md") -> Self:
        """The error for what the class of a model, or of a part of it, is or does."""
        return cls(f"{type(model).__name__} {fact}; {fix}")


class PairError(JetdraftError):
    """Target and drafter do not belong together."""


class OutputError(JetdraftError):
    """The output folder cannot be written."""


class BundleError(JetdraftError):
    """A bundle is missing, damaged or too new."""


class ContractError(BundleError):
    """A graph does not have the declared inputs and outputs."""


class ProviderError(JetdraftError):
    """This onnxruntime cannot run on the asked provider."""


class DeviceError(JetdraftError):
    """A device, its power mode or its profile is unknown or malformed."""


class StoreError(JetdraftError):
    """Earlier responses or a table cannot be used to draft from."""


class DataError(JetdraftError):
    """Texts to train on are missing, malformed or too short."""


class TrainingError(JetdraftError):
    """A training went wrong and was stopped."""


class CheckError(JetdraftError):
    """`jetdraft check` found a wrong text."""


@contextmanager
def importing(doing: str, extra: str) -> Iterator[None]:
    """Raise a `JetdraftError` that begins with `doing` without packages of `extra`."""
    try:
        yield
    except ImportError as error:
        fact = f"{doing} needs {error.name}; pip install 'jetdraft[cpu,{extra}]'"
        raise JetdraftError(fact) from error


@contextmanager
def as_error(
    kind: type[JetdraftError],
    causes: type[Exception] | tuple[type[Exception], ...],
    fact: str,
    fix: str,
    field: str = "",
) -> Iterator[None]:
    """Raise a `kind` for one of the `causes` in the block: fact, reason and fix.

    As a cause, `Exception` leaves jetdraft's own errors out. An `OptionError` names the
    `field`.

        with as_error(OutputError, OSError, f"cannot write {file}", "free some space"):
            file.write_bytes(data)
    """
    try:
        yield
    except causes as error:
        if causes is Exception and isinstance(error, JetdraftError):
            raise
        own = kind(f"{fact} ({reason_of(error)}); {fix}")
        if isinstance(own, OptionError):
            own.field = field or own.field
        raise own from error


@contextmanager
def refusing(refusal: Exception, *causes: type[Exception]) -> Iterator[None]:
    """Raise `refusal` for one of the `causes` in the block."""
    try:
        yield
    except causes as error:
        raise refusal from error


def check_choice(
    kind: type[JetdraftError],
    name: str,
    value: object,
    choices: Iterable[object],
    *field: str,
) -> None:
    """Raise a `kind`, perhaps with a `field`, unless `value` is one of `choices`."""
    if value not in (known := list(choices)):
        listed = ", ".join(map(str, known))
        raise kind(f"unknown {name} {value!r}; choose {listed}", *field)


def reason_of(error: Exception) -> str:
    """What went wrong in one line, for an error of the system without its file name.

    It is the first line of the message, or two after a colon; if long, one sentence.
    """
    message = str(getattr(error, "strerror", None) or error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    shown = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    text = " ".join(shown) or type(error).__name__
    return printable(text if len(text) <= _LONG else text.partition(". ")[0])


_LONG = 200  # The most letters that `printable` and `reason_of` show, usually.


def printable(text: object, most: int = _LONG) -> str:
    r"""Return untrusted text as one line of at most `most` characters, safe to show.

    Line ends, control and escape characters, lone surrogates, invisible characters and
    characters that turn the direction of writing are shown as Python writes them. A
    longer text ends with "…".

    printable("a\x1b[2Jb\n")    # 'a\\x1b[2Jb\\n'
    """
    # No character becomes shorter, so what lies further behind is not shown anyway.
    shown = str(text)[: most + 1]
    escaped = ((c, c.encode("unicode_escape").decode("ascii")) for c in shown)
    line = "".join(c if c.isprintable() else code for c, code in escaped)
    return line if len(line) <= most else line[: most - 1] + "…"
