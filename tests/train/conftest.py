"""What the tests of trainings share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.periodic import write_periodic


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """The file of a text that repeats."""
    return write_periodic(tmp_path / "text.txt")
