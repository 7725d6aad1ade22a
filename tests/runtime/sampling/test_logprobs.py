"""A log probability depends on the row's logits alone."""

import numpy as np
import pytest

from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.logprobs import Logprob


def test_the_last_bits_do_not_come_from_the_graphs_sum():
    logits = np.random.default_rng(0).normal(0, 3, (2, 279)).astype(np.float32)
    logits[1] = logits[0]
    order = np.argsort(-logits)[:, :5]
    sums = np.array([5.0, 6.0], np.float32)  # of a kernel that sums rows in two ways
    answer = Answer(order, np.take_along_axis(logits, order, 1), sums, logits)
    first, second = (Logprob.of(answer, row, 7, 3) for row in (0, 1))
    assert first == second
    whole = logits[0].astype(np.float64)
    expected = whole[[7, *order[0, :3]]] - np.log(np.exp(whole).sum())
    assert [first.logprob, *(value for _, value in first.top)] == pytest.approx(
        expected
    )
    assert [token for token, _ in first.top] == order[0, :3].tolist()
