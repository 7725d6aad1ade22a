"""Drafts that end where the drafter doubts, and learning when that is."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import DataError, DraftingError, OptionError, StoreError
from jetdraft.methods import methods
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.model_proposer import (
    REPEATS,
    AcceptanceHead,
    DraftStop,
    confidence,
    make_draft_stop,
)
from jetdraft.train.acceptance import DRAFT_LENGTH, fit_head, record_verdicts, save_head

PROMPT = np.random.default_rng(6).integers(0, 288, 24).tolist()
HOW = {"token_ids": PROMPT, "max_new_tokens": 60, "ignore_eos": True}


def sure(probability, hidden=None):
    """An answer whose best candidate has that probability."""
    logits = np.log(np.array([[probability, 1 - probability]], np.float32))
    return Answer(np.array([[4, 5]]), logits, np.zeros(1, np.float32), logits, hidden)


@pytest.mark.parametrize(
    ("product", "threshold", "rates"),
    [(False, 0.6, (0.7, 0.61, 0.59)), (True, 0.5, (0.8, 0.8, 0.7))],
)
def test_confidence_of_the_last_token_or_of_all(product, threshold, rates):
    rule = DraftStop(confidence, threshold, product)
    for _ in range(2):
        rule.begin()
        assert [rule.ends_draft(sure(rate)) for rate in rates] == [False, False, True]


def constant_head(bias, size=3):
    zeros = np.zeros((size, size), np.float32)
    return AcceptanceHead(zeros, zeros[0], np.float32(bias), np.float32(1.0))


def test_a_head_multiplies_its_rates():
    """Rates of one half: after two tokens a rejection is likelier than 0.7."""
    rule = DraftStop(constant_head(0.0).rate_after, 1.0 - 0.7)
    rule.begin()
    hidden = np.ones((1, 3), np.float32)
    assert [rule.ends_draft(sure(0.5, hidden)) for _ in range(2)] == [False, True]


def test_a_rate_is_that_of_the_written_formula():
    random = np.random.default_rng(0)
    block, out, x = (
        random.normal(size=shape).astype(np.float32) for shape in ((4, 4), (4,), (4,))
    )
    head = AcceptanceHead(block, out, np.float32(0.3), np.float32(0.5))
    y = 0.5 * x.astype(float)
    for _ in range(REPEATS):
        z = block @ y
        y = y + z * (1 / (1 + np.exp(-z)))
    assert head.rate(x) == pytest.approx(1 / (1 + np.exp(-(out @ y + 0.3))), abs=1e-5)


@pytest.mark.parametrize("rule", ["confidence", "product"])
@pytest.mark.parametrize("way", [{}, {"temperature": 0.9, "seed": 4}], ids=str)
def test_thresholds_shorten_drafts_and_change_no_text(model, rule, way):
    plain = model.generate(method="none", **HOW, **way)
    drafted = []
    for threshold in (0.0, 0.02, 1.0):
        found = model.generate(
            method="draft", num_draft_tokens=6,
            drafting={"stopping": rule, "stop_threshold": threshold}, **HOW, **way,
        )  # fmt: skip
        assert found.token_ids == plain.token_ids
        drafted.append(found.stats.drafted_tokens / found.stats.target_passes)
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 5
    assert drafted[-1] <= 1


@pytest.mark.parametrize(("bias", "length"), [(99.0, 6), (-99.0, 1)])
def test_a_head_that_always_says_the_same(model, monkeypatch, bias, length):
    head = constant_head(bias, model.parts.drafter.contract.hidden_size)
    monkeypatch.setattr(AcceptanceHead, "load", lambda *given: head)
    # A proposer that was made before has the head of that time.
    monkeypatch.setattr(model.planner, "_proposers", {})
    found = model.generate(
        method="draft", num_draft_tokens=6, drafting={"stopping": "learned"}, **HOW
    )
    assert found.stats.rounds_by_choice.get(f"draft:{length}", 0) > 10
    assert model.generate(method="none", **HOW).token_ids == found.token_ids


def test_rules_do_not_outlive_their_generation(model):
    model.generate(method="draft", drafting={"stopping": "confidence"}, **HOW)
    found = model.generate(method="draft", num_draft_tokens=5, **HOW)
    assert found.stats.rounds_by_choice["draft:5"] > 20


@pytest.mark.parametrize("rule", ["confidence", "product", "learned"])
def test_a_rule_without_a_drafter_is_refused(bundle, rule):
    """It does not silently become no rule."""
    with jetdraft.load(bundle, threads=1, drafter_provider="off") as model:
        assert make_draft_stop(None, None, model.parts) is None
        with pytest.raises(DraftingError, match="needs a drafter"):
            make_draft_stop(rule, None, model.parts)


def test_a_head_of_another_bundle_is_refused(tmp_path):
    file, broken = tmp_path / "head.npz", tmp_path / "broken.npz"
    constant_head(0.0).save(file, "one")
    assert AcceptanceHead.load(file, "one", 3).rate(np.zeros(3, np.float32)) == 0.5
    replace(constant_head(0.0), bias=np.array(np.nan, np.float32)).save(broken, "one")
    (tmp_path / "text.npz").write_bytes(b"nothing")
    for path, bundle, size, words in (
        (file, "two", 3, "another bundle"),
        (file, "one", 4, "is not an acceptance head"),
        (broken, "one", 3, "is not an acceptance head"),
        (tmp_path / "text.npz", "one", 3, "is not an acceptance head"),
        (tmp_path / "missing.npz", "one", 3, "train acceptance"),
    ):
        with pytest.raises(StoreError, match=words):
            AcceptanceHead.load(path, bundle, size)


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
    hidden = 5 * np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
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
    assert loss <= fit_head(hidden, accepted, steps=1)[1]


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
