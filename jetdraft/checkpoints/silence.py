"""Keeping other libraries quiet."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(level: int) -> Iterator[None]:
    """Drop log records up to `level` from all loggers while the block runs."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide the loaders' progress bars while the block runs."""
    import transformers  # which the command line does not wait for

    shown = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
