from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jetdraft.methods.chimera.module import ROW_TOKENS
from jetdraft.methods.chimera.task import ChimeraTask, SeenRows
from jetdraft.methods.glide.task import GlideTask
from jetdraft.runtime.passes.halves import PlacedRows
from jetdraft.train.heads import DRAFT_ROWS
from tests.train.attached.conftest import check_drafts, followed, in_floats
from tests.train.periodic import QUICK, made

METHOD, LAYERS = "chimera", 2
TEXT = np.random.default_rng(6).integers(1, 288, 14).tolist()
READ, AGAIN = 8, 11
"""Rows of the target that a drafter sees at first, and after an accepted draft."""


@pytest.fixture(scope="module")
def floats(target, head, tmp_path_factory):
    with in_floats(target, head, tmp_path_factory.mktemp("floats"), TEXT) as parts:
        yield parts


def expected(module, features, kept, seen):
    ids = torch.tensor([[0, 0, *TEXT]]).unfold(1, ROW_TOKENS, 1)
    rows, logits = torch.arange(len(TEXT)), []
    stored = module.keys_values(features, rows[None])
    view = SeenRows(*stored, known=(rows < seen)[None])
    state = features[:, seen - 1 : seen]
    for place, row in enumerate(range(seen, len(TEXT))):
        at = torch.tensor([[row - 1]])
        token, attention = ids[:, row : row + 1], view.attention_at(place)
        hidden, state = module(token, state, at, attention)
        logits.append(module.lm_head(hidden)[0, 0, kept].numpy())
    return np.sort(logits)[:, ::-1]


def test_the_graph_drafts_what_the_training_computed(floats):
    model, module, features = floats
    model.forget()
    parts, follower = model.parts, model.parts.draft_cache
    kept = parts.bundle.draft_vocabulary()
    states = parts.target.run(TEXT).features.copy()
    np.testing.assert_allclose(states, features[0], atol=1e-4)
    wanted = partial(expected, module, features, kept)
    check_drafts(follower, TEXT, states, (READ, AGAIN), wanted)


def test_a_path_of_a_tree_is_a_chain(floats):
    model, _, _ = floats
    parts, follower = model.parts, model.parts.draft_cache
    states = parts.target.run(TEXT).features.copy()

    followed(follower, TEXT, states, READ)
    chain = [follower.step(t).candidate_logits[-1].copy() for t in (5, 7, 9)]
    followed(follower, TEXT, states, READ)
    drafts = []
    for placed in (
        ([4, 5], [0, 0], [[], []], 0),
        ([6, 7], [1, 1], [[0], [1]], 2),
        ([9], [2], [[1, 3]], 4),
    ):
        drafts.append(follower.branch(PlacedRows(*placed)).candidate_logits.copy())
    _, made, last = drafts
    np.testing.assert_allclose(made[1], chain[1], atol=1e-5)
    np.testing.assert_allclose(last[0], chain[2], atol=1e-5)
    assert np.abs(made[0] - chain[1]).max() > 0.01


def test_the_tokens_before_rows(floats):
    cache = floats[0].parts.draft_cache
    windows = [cache._window_at([5, 8, 9], end) for end in range(4)]
    assert windows == [(0, 0), (0, 5), (5, 8), (8, 9)]
    assert cache._windows([7, 5, 8, 9, 4], 2, 3).tolist() == [[7, 5], [5, 8], [8, 9]]


@pytest.mark.parametrize("task", [ChimeraTask, GlideTask])
def test_no_draft_sees_rows_that_the_runtime_lacks(target, text, tmp_path, task):
    run = made(task, target, tmp_path / "out", [text], None, QUICK)
    drafter, rows = run.module.drafter.eval(), torch.arange(15)
    states = [torch.randn(1, 15, 64), *torch.randn(2, 1, 2, 15, 16)]
    lesson = SimpleNamespace(ids=torch.arange(1, 16)[None])
    starts = rows - (rows - 2) % DRAFT_ROWS
    assert starts.tolist()[2:] == [2] * 5 + [7] * 5 + [12] * 3
    hidden = []
    with torch.no_grad():
        for _ in range(2):
            features, lesson.keys, lesson.values = [s.clone() for s in states]
            lesson.taps = [features]
            hidden.append(run.task.hidden(drafter, lesson, starts))
            for state in states:
                state[..., 7:, :] = 9.0
    moved = (hidden[1] - hidden[0]).abs()
    assert moved[:, 2:12].max() < 1e-5
    assert moved[:, 12:].max() > 0.01
