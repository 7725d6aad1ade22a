from __future__ import annotations

import pytest
from tasks import rouge_l


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0),
        ([1, 2, 3, 4], [1, 3, 4, 9], 0.75),
        ([3, 2, 1], [1, 2, 3], 1 / 3),
        ([1, 2], [1, 2, 3, 4], 4 / 6),
        ([], [1], 0.0),
        ([], [], 1.0),
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one, other, score):
    assert rouge_l(one, other) == pytest.approx(score)
    assert rouge_l(other, one) == pytest.approx(score)
