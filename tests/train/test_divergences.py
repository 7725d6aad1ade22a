"""Each divergence of DistillSpec's grid, and what is predicted of drafts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from jetdraft.train.labels import (
    DIVERGENCES,
    JENSEN_SHANNON,
    PREDICTED_TOKENS,
    Labels,
    add_rest,
    rates_by_place,
    tokens_per_pass,
)


def pair(rows: int = 6, tokens: int = 9):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    return (2 * logits).log_softmax(-1)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_it_is_zero_for_equal_distributions_only(name):
    wanted, got = pair()
    apart = DIVERGENCES[name](wanted, got, 0.3)
    assert apart.shape == (6,)
    assert (apart > 0.01).all()
    assert DIVERGENCES[name](wanted, wanted, 0.3).abs().max() < 1e-12


@pytest.mark.parametrize("name", DIVERGENCES)
def test_its_gradients_are_those_of_finite_differences(name):
    wanted, got = pair()
    logits = got.clone().requires_grad_(True)
    torch.autograd.gradcheck(
        lambda x: DIVERGENCES[name](wanted, x.log_softmax(-1), 0.3), logits
    )


def test_jensen_shannon_goes_from_one_divergence_to_the_other():
    """For a small beta it is beta times the forward KL; for a large one, the other."""
    wanted, got = pair()
    js = DIVERGENCES[JENSEN_SHANNON]
    for beta, other in ((1e-6, "forward-kl"), (1 - 1e-6, "reverse-kl")):
        small = min(beta, 1 - beta)
        expected = DIVERGENCES[other](wanted, got, 0.0)
        torch.testing.assert_close(
            js(wanted, got, beta) / small, expected, rtol=1e-2, atol=1e-3
        )


def exact(wanted):
    ones = torch.ones(len(wanted), dtype=wanted.dtype)
    return Labels(wanted, ones, ones.bool())


def test_what_is_not_accepted_is_the_total_variation():
    wanted, got = pair()
    accepted = exact(wanted).accepted(got)
    torch.testing.assert_close(accepted, 1.0 - DIVERGENCES["tv"](wanted, got, 0.0))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_likeliest_tokens_and_the_rest_are_a_bound(name):
    """Tokens that count as one cannot differ; with all tokens the bound is exact."""
    wanted, got = pair()
    apart = DIVERGENCES[name](wanted, got, 0.5)
    before = torch.zeros(6, dtype=torch.float64)
    for kept in (1, 4, 8):
        best = wanted.topk(kept, dim=-1)
        labels = Labels(
            add_rest(best.values), torch.ones(6), torch.ones(6).bool(), best.indices
        )
        bound = DIVERGENCES[name](labels.wanted, labels.binned(got), 0.5)
        assert (bound > before - 1e-9).all()
        assert (bound < apart + 1e-9).all()
        before = bound
    torch.testing.assert_close(before, apart)


def test_drafts_by_place_are_counted_from_every_place():
    texts = [torch.tensor([1.0, 0.5, 1.0, 0.2, 0.9, 0.4]), torch.tensor([0.3])]
    accepted, reached = [0.0] * PREDICTED_TOKENS, [0.0] * PREDICTED_TOKENS
    for text, place in product(texts, range(PREDICTED_TOKENS)):
        for start in range(len(text) - place):
            before = text[start : start + place].prod().item()
            reached[place] += before
            accepted[place] += before * text[start + place].item()
    expected = [a / r for a, r in zip(accepted, reached, strict=True)]
    assert rates_by_place(texts) == pytest.approx(expected, abs=1e-4)
    assert rates_by_place([torch.tensor([1.0, 0.5, 1.0])]) == [0.8333, 0.6667, 1.0, 0.0]
    assert tokens_per_pass([0.5, 0.5]) == 1.75
