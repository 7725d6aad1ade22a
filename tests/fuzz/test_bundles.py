"""Damaged bundles and files, a few hundred of them."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.fuzz.bundles import Bundles
from tests.fuzz.subject import case
from tests.fuzz.test_same_text import FAST


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Templates may compute for 0.3 s here, not 5: some never end."""
    with (
        mock.patch("jetdraft.runtime.text.sandbox.MOST_SECONDS", 0.3),
        Bundles(tmp_path_factory.mktemp("bundles"), light=True) as subject,
    ):
        yield subject


# numpy leaves a damaged npz open until it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(FAST, max_examples=150)
@given(number=st.integers(0, 10**9))
def test_damage_gives_a_clear_error_or_the_right_text(subject, number):
    note(f"scripts/fuzz --case bundles:{number}")
    subject.run(case(subject, number))
