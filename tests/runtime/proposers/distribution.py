"""Whether a verifier keeps the target's distribution, by a chi-square test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

other_verifiers = pytest.mark.parametrize(
    "drafting",
    [
        {"verifier": "rejection", "tree": "k-ary", "branching": (1, 1, 1),
         "siblings": "with-replacement"},
        {"verifier": "recursive", "tree": "k-ary", "branching": (2, 1),
         "siblings": "without-replacement"},
    ],
    ids=["rejection", "recursive"],
)  # fmt: skip


def check_distribution(draw: Callable[..., Any], drafting: Any, draws: int) -> None:
    """Compare the second token of texts with plain decoding and with drafts.

    `draw` gives a result for the options of sampling, and for drafts those of drafting.
    """
    plain, drafted = [], []
    for seed in range(draws):
        way = {"temperature": 0.7, "top_k": 5, "seed": seed}
        plain.append(tuple(draw(way, None).token_ids))
        own = {"drafting": drafting, "exact": False}
        drafted.append(tuple(draw(way, own).token_ids))
    common = sorted(set(plain), key=plain.count)[-8:]
    counts = [[texts.count(t) for t in common] for texts in (plain, drafted)]
    spread = sum((a - b) ** 2 / (a + b) for a, b in zip(*counts, strict=True))
    assert spread < 24.3  # 0.1 % of 7 degrees of freedom
