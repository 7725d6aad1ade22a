"""Errors in the words of the command line, whoever raised them."""

from __future__ import annotations

import re

from jetdraft.errors import DraftingError, JetdraftError

_PYTHON = re.compile(r" \((?:\w+=\w*|Model\.\w+)\)")
"""What to write in Python instead of a flag, behind the flag."""


def as_typed(error: JetdraftError) -> str:
    """The message of an error, with options as they are typed: with dashes.

    as_typed(DraftingError("stop_threshold ..."))    # "stop-threshold ..."
    """
    message = _PYTHON.sub("", str(error))
    if isinstance(error, DraftingError):
        # It loads the packages of methods, which an error of drafting has loaded.
        from jetdraft.runtime.planning.registry import methods

        options = [method.options.option_names() for method in methods().values()]
        for name in {name for names in options for name in names if "_" in name}:
            message = re.sub(rf"\b{name}\b", name.replace("_", "-"), message)
    return message
