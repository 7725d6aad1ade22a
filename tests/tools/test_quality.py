from __future__ import annotations

import numpy as np
import pytest

import jetdraft
from tools.recipes.quality import Quality, compare


def test_kl_top_1_and_perplexity_of_two_distributions():
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], np.float32)) + 3
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32)) - 7
    quality = Quality()
    quality.add(p, q, [1])
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert quality.kl_mean == pytest.approx(first / 2, abs=1e-6)
    assert quality.kl_p99 == pytest.approx(0.99 * first, abs=1e-6)
    assert quality.top1_agreement == 0.5
    assert quality.perplexity == pytest.approx(2.0, abs=1e-5)


def test_a_model_agrees_with_itself(bundle, model):
    other = jetdraft.load(bundle, threads=1)
    windows = [list(range(1, 100)), [5, 6, 7]]
    quality = compare(model.parts.target, other.parts.target, windows)
    assert quality.kl_mean == 0.0
    assert quality.top1_agreement == 1.0
    assert quality.counted == 98 + 2
    assert model.parts.target.cache.length == 0
