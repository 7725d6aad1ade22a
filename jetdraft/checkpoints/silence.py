"""Keeping other libraries quiet."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced(level: int) -> Iterator[None]:
    """Drop log records up to `level` from all loggers while the block runs.

    with silenced(logging.WARNING):
        model = load()
    """
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
