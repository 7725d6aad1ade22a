"""A server among hostile clients, a few hundred requests."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.fuzz.serving import Serving
from tests.fuzz.subject import case
from tests.fuzz.test_same_text import FAST


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    with Serving(tmp_path_factory.mktemp("server"), light=True) as subject:
        yield subject


@settings(FAST, max_examples=200)
@given(number=st.integers(0, 10**9))
def test_hostile_requests_harm_nobody(subject, number):
    note(f"scripts/fuzz --case server:{number}")
    subject.run(case(subject, number))


def test_the_server_is_as_it_was(subject):
    subject.finish()
