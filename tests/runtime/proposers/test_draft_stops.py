"""Drafts that end where the drafter doubts."""

from dataclasses import replace

import numpy as np
import pytest

import jetdraft
from jetdraft.errors import DraftingError, OptionError, StoreError
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.proposers.model_proposer import (
    REPEATS,
    AcceptanceHead,
    DraftStop,
    confidence,
    make_draft_stop,
)

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
    size = model.parts.drafter.contract.hidden_size
    head = constant_head(bias, size)
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
    head = replace(constant_head(0.0), bias=np.array(np.nan, np.float32))
    head.save(broken, "one")
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stopping": "never"}, "unknown stopping"),
        ({"stop_threshold": 0.5}, "give stopping too"),
        ({"stopping": "confidence", "stop_threshold": 1.5}, "out of range"),
        ({"stopping": "confidence", "stop_threshold": -0.1}, "out of range"),
        ({"stopping": "product", "tree": "best"}, "ends chains, not trees"),
        ({"stopping": "product", "stop_threshold": "x"}, "give a number"),
    ],
)
@pytest.mark.parametrize("method", ["draft", "auto"])
def test_bad_options(model, method, options, words):
    with pytest.raises(OptionError, match=words) as refusal:
        model.generate(**HOW, method=method, drafting=options)
    assert refusal.value.field == "drafting"
