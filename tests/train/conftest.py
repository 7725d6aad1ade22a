"""What the tests of trainings share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from tests.train.periodic import write_periodic


@pytest.fixture(autouse=True, scope="module")
def _new_precision_of_file() -> None:
    """Let the fixtures of a file multiply in their own type; see `_new_precision`."""
    AcceleratorState._reset_state()


@pytest.fixture(autouse=True)
def _new_precision() -> Iterator[None]:
    """Let each test multiply in its own type; accelerate keeps that of the first."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The file of a text that repeats."""
    return write_periodic(tmp_path / "text.txt")
