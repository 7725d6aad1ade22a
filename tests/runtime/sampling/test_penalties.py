"""Biases and penalties depend on the prefix alone: same seed, same text."""

from __future__ import annotations

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.processors import Penalties, PenaltyProcessor

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
WAYS = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": {7: 5.0, 40: -9.0, 41: 3.0}},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "logit_bias": {3: 4.0}},
]
METHODS = [
    {"method": "draft", "num_draft_tokens": 4},
    {"method": "draft", "drafting": {"tree": "best"}, "num_draft_tokens": 7},
    {"method": "lookup", "num_draft_tokens": 3},
    {"method": "auto"},
]
LOGITS = np.array([[2.0, -1.0, 0.5, 3.0], [1.0, 1.0, -2.0, 0.0]], np.float32)


def answer(logits):
    order = np.argsort(-logits, kind="stable")[:, :3]
    best = np.take_along_axis(logits, order, 1)
    return Answer(order, best, np.zeros(len(logits), np.float32), logits)


def process(penalties, rows, context, prompt):
    logits = answer(LOGITS[: len(rows)])
    return PenaltyProcessor(penalties, prompt).process(logits, rows, context)


def test_each_rule_by_hand():
    """Prompt 0, then 3 twice; the row below the root carries 1."""
    rows, context = Rows.chain([3, 1]), [0, 3, 3]
    repetition = process(Penalties(repetition_penalty=2.0), rows, context, [0])
    np.testing.assert_allclose(
        repetition.logits, [[1.0, -1.0, 0.5, 1.5], [0.5, 0.5, -2.0, 0.0]]
    )
    presence = process(Penalties(presence_penalty=1.0), rows, context, [0])
    np.testing.assert_allclose(
        presence.logits, [[2.0, -1.0, 0.5, 2.0], [1.0, 0.0, -2.0, -1.0]]
    )
    frequency = process(Penalties(frequency_penalty=1.0), rows, context, [0])
    np.testing.assert_allclose(
        frequency.logits, [[2.0, -1.0, 0.5, 1.0], [1.0, 0.0, -2.0, -2.0]]
    )
    bias = process(Penalties({2: 10.0}), rows, context, [0])
    np.testing.assert_allclose(bias.logits[:, 2], [10.5, 8.0])


def test_candidates_and_their_sum_follow():
    biased = process(Penalties({2: 10.0}), Rows.chain([3, 1]), [0, 3], [0])
    np.testing.assert_array_equal(biased.candidates, [[2, 3, 0], [2, 0, 1]])
    np.testing.assert_allclose(biased.candidate_logits[0], [10.5, 3.0, 2.0])
    expected = np.log(np.exp(biased.logits.astype(float)).sum(1))
    np.testing.assert_allclose(biased.logsumexp, expected, rtol=1e-6)


def test_siblings_see_only_their_own_path():
    tree = Rows([3, 1, 0], [-1, 0, 0])
    logits = np.vstack([LOGITS, LOGITS[:1]])
    processor = PenaltyProcessor(Penalties(presence_penalty=1.0), [2])
    penalized = processor.process(answer(logits), tree, [2, 3]).logits
    np.testing.assert_allclose(penalized[1], LOGITS[1] - [0, 1, 0, 1])
    np.testing.assert_allclose(penalized[2], LOGITS[0] - [1, 0, 0, 1])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_same_text_with_every_method(model, way, temperature):
    options = {
        **way, "token_ids": IDS, "max_new_tokens": 100, "ignore_eos": True,
        "temperature": temperature, "seed": 5,
    }  # fmt: skip
    plain = model.generate(method="none", **options)
    bare = model.generate(**{**options, **dict.fromkeys(way)} | neutral(way))
    assert plain.token_ids != bare.token_ids, "it changes something"
    for method in METHODS:
        found = model.generate(**method, **options)
        assert found.token_ids == plain.token_ids, method


def neutral(way):
    values = {"repetition_penalty": 1.0, "logit_bias": None}
    return {name: values.get(name, 0.0) for name in way}


def test_with_filters_and_another_verifier(model):
    options = {
        "token_ids": IDS, "max_new_tokens": 60, "ignore_eos": True, "seed": 2,
        "temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
    }  # fmt: skip
    plain = model.generate(method="none", **options).token_ids
    assert model.generate(method="draft", **options).token_ids == plain
    drawn = {
        "tree": "k-ary", "branching": [1, 1, 1], "siblings": "with-replacement",
        "verifier": "rejection",
    }  # fmt: skip
    found = model.generate(method="draft", drafting=drawn, exact=False, **options)
    assert len(found.token_ids) == 60


def test_a_ban_is_kept_and_a_wish_is_granted(model):
    options = {"token_ids": IDS, "max_new_tokens": 50, "ignore_eos": True}
    common = model.generate(**options).token_ids[0]
    banned = model.generate(**options, logit_bias={common: -100.0}).token_ids
    assert common not in banned
    assert set(model.generate(**options, logit_bias={9: 100.0}).token_ids) == {9}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logit_bias": {"a": 1.0}}, "ids of tokens"),
        ({"logit_bias": {1: float("nan")}}, "not a number"),
        ({"logit_bias": [1]}, "is not a mapping"),
        ({"logit_bias": {288: 1.0}}, "outside the vocabulary"),
        ({"repetition_penalty": 0.0}, "repetition penalty 0.0 is out of range"),
        ({"presence_penalty": 101.0}, "presence penalty"),
        ({"frequency_penalty": float("nan")}, "frequency penalty"),
        ({"repetition_penalty": "1"}, "not a number"),
    ],
)
def test_wrong_values_are_refused(model, wrong, words):
    with pytest.raises(OptionError, match=words):
        model.generate(token_ids=IDS, **wrong)
