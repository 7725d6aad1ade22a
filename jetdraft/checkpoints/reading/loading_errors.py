"""The errors of other libraries' loaders, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from jetdraft.errors import CheckpointError, JetdraftError, printable

OWN_CODE = {"trust_remote_code": False}
"""Otherwise transformers asks on the terminal whether to run a checkpoint's code."""

_LONG = 200
"""Letters of a message that are shown whole."""


@contextmanager
def as_checkpoint_error(source: str) -> Iterator[None]:
    """Turn the errors of loaders into `CheckpointError`s of one line.

    with as_checkpoint_error("org/name"): ...
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(
            f"the weights of {source} are damaged ({error}); fetch them again"
        ) from error
    except JetdraftError:
        raise
    except Exception as error:  # pickle and transformers raise whatever they stumble on
        raise CheckpointError(
            f"cannot load {source} ({first_line(error)}); check the folder or the "
            "hub id"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of a message, and the next one if the first announces it.

    Of a long line the first sentence is left.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    text = " ".join(shown) or type(error).__name__
    return printable(text if len(text) <= _LONG else text.partition(". ")[0])
