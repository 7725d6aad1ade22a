"""Learning when a drafter should stop."""

import shutil

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import DataError, OptionError
from jetdraft.methods import methods
from jetdraft.train.acceptance import DRAFT_LENGTH, fit_head, record_verdicts, save_head

PROMPTS = [np.random.default_rng(seed).integers(0, 288, 20) for seed in range(3)]


def test_what_is_watched_are_the_compared_tokens(model):
    hidden, accepted = record_verdicts(
        model, PROMPTS, max_new_tokens=40, temperature=0.0
    )
    evaluated = right = 0
    for prompt in PROMPTS:
        stats = model.generate(
            token_ids=prompt,
            method="draft",
            num_draft_tokens=DRAFT_LENGTH,
            max_new_tokens=40,
        ).stats
        # The last token of a draft is compared too, but not watched.
        evaluated += sum(stats.evaluated_by_position[: DRAFT_LENGTH - 1])
        right += sum(stats.accepted_counts[: DRAFT_LENGTH - 1])
    assert abs(len(hidden) - evaluated) <= len(PROMPTS)
    assert abs(accepted.sum() - right) <= len(PROMPTS) * DRAFT_LENGTH
    assert hidden.shape[1] == model.parts.drafter.contract.hidden_size


def test_a_head_learns_what_there_is_to_learn():
    random = np.random.default_rng(0)
    hidden = 5 * random.normal(size=(2000, 16)).astype(np.float32)
    accepted = (hidden[:, 3] > 0).astype(np.float32)
    head, loss = fit_head(hidden, accepted)
    rates = np.array([head.rate(state) for state in hidden[:300]])
    assert ((rates > 0.5) == (accepted[:300] > 0)).mean() > 0.9
    assert loss < 0.7


def test_a_head_is_not_learned_by_heart():
    """Verdicts that nothing tells: guessing the rate is the best there is."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(300, 64)).astype(np.float32)
    accepted = (random.random(300) < 0.8).astype(np.float32)
    _, loss = fit_head(hidden, accepted)
    at_first = fit_head(hidden, accepted, steps=1)[1]
    assert loss <= at_first


def test_a_learned_head_is_used(bundle, tmp_path):
    model = jetdraft.load(shutil.copytree(bundle, tmp_path / "own"), threads=1)
    head, _ = fit_head(
        *record_verdicts(model, PROMPTS, max_new_tokens=40, temperature=0.0), steps=20
    )
    save_head(head, model.parts.profiles.acceptance_file, model.bundle.sha256)
    how = {"token_ids": PROMPTS[0], "max_new_tokens": 40}
    found = model.generate(method="draft", drafting={"stopping": "learned"}, **how)
    assert found.token_ids == model.generate(method="none", **how).token_ids


def test_too_little_to_learn_from(model):
    with pytest.raises(DataError, match="more prompts"):
        record_verdicts(model, PROMPTS[:1], max_new_tokens=4, temperature=0.0)


def test_watching_leaves_no_trace(model):
    """Nor is there another method meanwhile, which other threads would see."""
    before, meanwhile = set(methods()), set()
    again = [
        record_verdicts(
            model, PROMPTS, 40, 0.0, tick=lambda: meanwhile.update(methods())
        )[0]
        for _ in range(2)
    ]
    np.testing.assert_allclose(*again, atol=1e-4)
    assert meanwhile == before == set(methods())
    assert model.planner.proposers()["draft"].stop is None


def test_without_a_drafter_there_is_nothing_to_watch(bundle):
    model = jetdraft.load(bundle, threads=1, drafter_provider="off")
    with pytest.raises(OptionError, match="needs a drafter; export with --drafter"):
        record_verdicts(model, PROMPTS, 40, 0.0)
