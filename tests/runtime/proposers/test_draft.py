"""The drafter's cache must follow the public sequence through every outcome."""

import numpy as np
import pytest

from jetdraft.methods import Method, registered
from jetdraft.runtime.passes.graph import Graph
from jetdraft.runtime.passes.session import StepSessions, open_session
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests.runtime.proposers.drafter import drafter_of

CONTEXT = np.random.default_rng(2).integers(0, 288, 30).tolist()


@pytest.fixture
def drafter(model):
    proposer = drafter_of(model.parts.drafter)
    proposer.begin(CONTEXT, Chooser(Sampling()))
    return proposer


def fresh(model, context, budget):
    """What a drafter that has seen nothing else proposes."""
    proposer = drafter_of(model.parts.drafter)
    proposer.begin(context, Chooser(Sampling()))
    return proposer.propose(context, budget).tokens


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_every_outcome_leaves_the_cache_in_step(model, drafter, budget):
    for accepted in range(budget + 1):
        drafter.begin(CONTEXT, Chooser(Sampling()))
        draft = drafter.propose(CONTEXT, budget).tokens
        assert len(draft) == budget + 1
        right = draft[1 : 1 + accepted]
        last = draft[1 + accepted] if accepted < budget else 0
        committed = [*right, (last + 1) % 288]
        context = CONTEXT + committed
        again = drafter.propose(context, 4).tokens
        assert again == fresh(model, context, 4)


def test_rounds_of_others_are_caught_up(model, drafter):
    drafter.propose(CONTEXT, 3)
    context = [*CONTEXT, 1, *range(90)]
    assert drafter.propose(context, 3).tokens == fresh(model, context, 3)


def test_a_drafter_that_is_the_target_is_always_right(model):
    entry = model.bundle.target
    session = open_session(model.bundle.path / entry.file, "cpu")
    twin = drafter_of(Graph(StepSessions(session, entry.contract)), "twin")
    for options in ({}, {"temperature": 0.8, "seed": 4}):
        # In its own exact class the twin runs one row at a time, so compare there.
        with registered(Method("twin", "the target itself", lambda parts, own: twin)):
            stats = model.generate(
                token_ids=CONTEXT, method="twin", num_draft_tokens=3, exact=False,
                max_new_tokens=120, ignore_eos=True, **options,
            ).stats  # fmt: skip
        assert stats.acceptance_rate > 0.97
        assert stats.tokens_per_pass > 3.7


def test_a_context_that_changes_is_followed(model, drafter):
    """What a branch chose beyond a gap may turn out wrong."""
    drafter.propose([*CONTEXT, 5, 6, 7], 3)
    context = [*CONTEXT, 5, 9]
    assert drafter.propose(context, 3).tokens == fresh(model, context, 3)


def test_one_target_pass_per_round_and_one_drafter_pass_per_token(model, drafter):
    drafter.propose(CONTEXT, 1)
    before = model.parts.drafter.passes
    drafter.propose([*CONTEXT, 5], 3)
    assert model.parts.drafter.passes - before == 3
