"""A model goes through any states, and its texts stay equal to plain decoding."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.fuzz.same_text import SameText

FAST = settings(
    max_examples=70,
    stateful_step_count=10,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
draws = st.randoms(use_true_random=True)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    with SameText(tmp_path_factory.mktemp("same-text"), light=True) as subject:
        yield subject


def test_every_text_is_the_text_of_plain_decoding(subject):
    class States(RuleBasedStateMachine):
        @initialize(at=st.integers(0, len(subject.worlds) - 1))
        def begin(self, at):
            subject.refresh()
            self.world = subject.worlds[at]

        @rule(draw=draws)
        def disturb(self, draw):
            subject.disturb(draw, self.world)

        @rule(draw=draws)
        def compare(self, draw):
            subject.compare(draw, self.world)

    run_state_machine_as_test(States, settings=FAST)
    assert subject.facts["generations compared"] > 400
    assert subject.facts["drafted tokens"] > 1000
