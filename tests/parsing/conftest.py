"""A bundle that a test may damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetdraft.testing import toy_bundle


@pytest.fixture
def own_toy(tmp_path: Path) -> Path:
    """A toy bundle of this test alone."""
    return toy_bundle(tmp_path / "toy")
