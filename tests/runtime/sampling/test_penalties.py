"""Biases and penalties depend on the prefix alone: same seed, same text."""

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.rows import Rows
from jetdraft.runtime.sampling.processors import Penalties, PenaltyProcessor
from tests.runtime.sampling.test_chooser import answer

IDS = np.random.default_rng(4).integers(0, 288, 20).tolist()
LOGITS = np.array([[2.0, -1.0, 0.5, 3.0], [1.0, 1.0, -2.0, 0.0]], np.float32)


def process(penalties, rows, context, prompt):
    logits = np.vstack([LOGITS, LOGITS[:1]])[: len(rows)]
    return PenaltyProcessor(penalties, prompt).process(answer(logits, 3), rows, context)


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        ({"repetition_penalty": 2.0}, [[1, -1, 0.5, 1.5], [0.5, 0.5, -2, 0]]),
        ({"presence_penalty": 1.0}, [[2, -1, 0.5, 2], [1, 0, -2, -1]]),
        ({"frequency_penalty": 1.0}, [[2, -1, 0.5, 1], [1, 0, -2, -2]]),
        ({"logit_bias": {2: 10.0}}, [[2, -1, 10.5, 3], [1, 1, 8, 0]]),
    ],
)
def test_each_rule_by_hand(penalty, expected):
    """Prompt 0, then 3 twice; the row below the root carries 1."""
    result = process(Penalties(**penalty), Rows.chain([3, 1]), [0, 3, 3], [0])
    np.testing.assert_allclose(result.logits, expected)


def test_candidates_and_their_sum_follow():
    biased = process(Penalties({2: 10.0}), Rows.chain([3, 1]), [0, 3], [0])
    np.testing.assert_array_equal(biased.candidates, [[2, 3, 0], [2, 0, 1]])
    np.testing.assert_allclose(biased.candidate_logits[0], [10.5, 3.0, 2.0])
    expected = np.log(np.exp(biased.logits.astype(float)).sum(1))
    np.testing.assert_allclose(biased.logsumexp, expected, rtol=1e-6)


def test_siblings_see_only_their_own_path():
    tree = Rows([3, 1, 0], [-1, 0, 0])
    penalized = process(Penalties(presence_penalty=1.0), tree, [2, 3], [2]).logits
    np.testing.assert_allclose(penalized[1], LOGITS[1] - [0, 1, 0, 1])
    np.testing.assert_allclose(penalized[2], LOGITS[0] - [1, 0, 0, 1])


@pytest.mark.parametrize(
    "way",
    [
        *({"repetition_penalty": 1.3}, {"presence_penalty": 1.5}),
        *({"frequency_penalty": 0.7}, {"logit_bias": {7: 5.0, 40: -9.0, 41: 3.0}}),
    ],
    ids=str,
)
def test_a_penalty_changes_the_text_and_no_draft_does(model, way):
    """`test_conformance.py` has all methods, with all penalties together."""
    options = {
        "token_ids": IDS, "max_new_tokens": 50, "ignore_eos": True, "seed": 5,
        "temperature": 0.9, "top_p": 0.9, "min_p": 0.02,
    }  # fmt: skip
    plain = model.generate(method="none", **options, **way)
    assert plain.token_ids != model.generate(method="none", **options).token_ids
    found = model.generate(method="draft", num_draft_tokens=4, **options, **way)
    assert found.token_ids == plain.token_ids
    drawn = {
        "tree": "k-ary", "branching": [1, 1, 1], "siblings": "with-replacement",
        "verifier": "rejection",
    }  # fmt: skip
    found = model.generate(
        method="draft", drafting=drawn, exact=False, **options, **way
    )
    assert len(found.token_ids) == 50


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
