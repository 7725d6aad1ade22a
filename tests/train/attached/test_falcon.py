from functools import partial

import numpy as np
import pytest
import torch

from jetdraft.methods.falcon.task import FalconTask, predict_features, shown_rows
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from tests import same_text
from tests.train.attached.conftest import check_drafts, followed, in_floats, random_head
from tests.train.periodic import PERIOD, QUICK, made

METHOD, LAYERS = "falcon", 2
TEXT = np.random.default_rng(6).integers(1, 288, 34).tolist()
READ, AGAIN = 20, 23
"""Rows of the target that a drafter sees at first, and after an accepted draft."""


def test_short_prompts_are_drafted_for_later(model):
    drafts = [{"method": "falcon", "num_draft_tokens": 3}]
    for count in (1, 2, 3):
        prompt = model.parts.text.encode(PERIOD)[:count]
        for found in same_text(model, drafts, token_ids=prompt, max_new_tokens=80):
            assert found.stats.drafted_tokens > 10


@pytest.fixture(scope="module", params=[2, 3])
def floats(request, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("floats")
    drafter = random_head(folder / "head", METHOD, block_size=request.param)
    with in_floats(target, drafter, folder, TEXT) as parts:
        yield parts


def whole(module, features, tokens, ends):
    """All rows without a cache; row t sees the rows up to `ends[t]`."""
    size, rows = module.config.slots, torch.arange(features.shape[1])
    pad = torch.nn.functional.pad
    windows = pad(features, (0, 0, size - 1, 0)).unfold(1, size, 1).transpose(-1, -2)
    ids = pad(torch.tensor([tokens]), (size - 1, 0)).unfold(1, size, 1)
    mask = torch.zeros(len(rows), len(rows))
    mask = mask.masked_fill(rows > torch.tensor(ends)[:, None], -torch.inf)
    return module(ids, windows, rows[None], None, mask[None, None])


def expected(module, features, kept, seen):
    """The logits of a draft after `seen` rows, for six tokens at least."""
    size, logits, text = module.config.slots, [], TEXT[: seen + 6]
    features, last = features[:, :seen], seen
    while len(logits) < len(text) - seen:
        ends = [min(row, last - 1) for row in range(last)]
        ends[last - size :] = [last - 1] * size
        with torch.no_grad():
            guessed = whole(module, features, text[1 : last + 1], ends)[:, -size:]
        logits += list(module.lm_head(guessed)[0, :, kept].numpy())
        features, last = torch.cat([features, guessed], 1), last + size
    return np.sort(logits)[:, ::-1]


def test_the_graph_drafts_what_the_module_computes_anew(floats):
    model, module, features = floats
    model.forget()
    parts, follower = model.parts, model.parts.draft_cache
    kept, states = parts.bundle.draft_vocabulary(), features[0].numpy()
    found = parts.target.run(TEXT[:16]).features
    np.testing.assert_allclose(found, states[:16], atol=1e-4)
    rows = READ, READ + 1, AGAIN, AGAIN + 1
    wanted = partial(expected, module, features, kept)
    check_drafts(follower, TEXT, states, rows, wanted, most=5)


def test_a_path_of_a_tree_is_a_chain(floats):
    model, _, features = floats
    follower, states = model.parts.draft_cache, features[0].numpy()
    size = follower.size
    path = TEXT[READ + 1 : READ + 1 + 2 * size]

    followed(follower, TEXT, states, READ)
    chain = [follower.step(token).candidate_logits[-1].copy() for token in path]
    followed(follower, TEXT, states, READ)
    root = follower.block
    other = [token + 1 for token in path[:size]]
    blocks = follower.branch_blocks([(root, other), (root, path[:size])], 0)
    made = [level.candidate_logits[-1].copy() for level in blocks[1].levels]
    np.testing.assert_allclose(made, chain[size - 1 : 2 * size - 1], atol=1e-5)
    assert np.abs(blocks[0].levels[0].candidate_logits[-1] - made[0]).max() > 0.001
    [end] = follower.branch_blocks([(blocks[1], path[size:])], 2 * follower.rows)
    np.testing.assert_allclose(end.levels[0].candidate_logits[-1], chain[-1], atol=1e-5)


@pytest.fixture
def begun(model):
    """A proposer with these options that has read `PERIOD` twice, and its prompt."""
    own, prompt = methods()["falcon"], model.parts.text.encode(PERIOD * 2)
    states = model.parts.target.run(prompt[:-1]).features.copy()

    def begin(sampling, **options):
        proposer = own.make(model.parts, own.options(**options))
        model.parts.draft_cache.forget()
        proposer.begin(prompt, Chooser(sampling))
        model.parts.draft_cache.observe(0, prompt[:-1], states)
        return proposer, prompt

    yield begin
    model.forget()


def test_a_tree_of_single_children_is_the_chain(begun):
    drafts = []
    for options in ({}, {"tree": "k-ary", "branching": (1,) * 6}):
        proposer, prompt = begun(Sampling(temperature=0.8, seed=2), **options)
        drafts.append(proposer.propose(prompt, 6).tokens)
    assert len(drafts[0]) == 7
    assert drafts[0] == drafts[1]


def test_a_pass_drafts_a_block(model, begun):
    follower = model.parts.draft_cache
    for options in ({}, {"tree": "k-ary", "branching": (2, 1, 1, 1, 1, 1)}):
        proposer, prompt = begun(Sampling(), **options)
        follower.follow(prompt)
        before = follower.graph.passes
        proposer.propose(prompt, 12 if options else 6)
        assert follower.graph.passes - before == 2


def test_rows_see_their_block_and_no_further(target, text, tmp_path):
    run = made(FalconTask, target, tmp_path / "out", [text], None, QUICK)
    drafter = run.module.drafter.eval()
    features, ids = torch.randn(1, 11, 64), torch.arange(1, 12)[None]
    places = (torch.arange(11) - 3) % 2  # rows 1 and 2 are a block
    with torch.no_grad():
        before = predict_features(drafter, features, ids, places)
        changed = features.clone()
        changed[:, 8] = 9.0  # the last row of a block
        after = predict_features(drafter, changed, ids, places)
    moved = (after - before).abs().amax(-1)[0] > 1e-4
    assert moved.tolist() == [False] * 7 + [True] * 4


def test_shown_rows_are_the_first_of_blocks():
    wrong = torch.ones(2, 12, dtype=torch.bool)
    wrong[1] = False
    places = torch.arange(12) % 3
    shown = shown_rows(wrong, places, 3, 0.4, seed=1)
    assert 2 <= int(shown[0].sum()) <= 4
    assert not shown[1].any()
    assert not shown[:, places == 2].any()
    assert (shown[:, places == 0] >= shown[:, places == 1]).all()
    assert torch.equal(shown, shown_rows(wrong, places, 3, 0.4, seed=1))
    assert not torch.equal(shown, shown_rows(wrong, places, 3, 0.4, seed=2))
