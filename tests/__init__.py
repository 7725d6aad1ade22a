"""What any module of tests may use."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

LONG: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
WAYS: tuple[dict[str, Any], ...] = {}, {"temperature": 0.9, "seed": 4}
"""Greedy and sampled."""


def cases(names: str, *rows: Any, **options: Any) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` where each row of the table is an argument."""
    return pytest.mark.parametrize(names, rows, **options)


def same_text(
    model: Any,
    drafts: Iterable[Any],
    ways: Iterable[Mapping[str, Any]] = WAYS,
    **how: Any,
) -> list[Any]:
    """Assert that all drafts (a method, or options) write the text of plain decoding.

    In each of the `ways` to sample; gives the results. `LONG` is the default of `how`.
    """
    results = []
    for way in ways:
        options = {**LONG, **how, **way}
        plain = model.generate(method="none", **options)
        for draft in drafts:
            own = {"method": draft} if isinstance(draft, str) else draft
            drafted = model.generate(**{**options, **own})
            for name in ("token_ids", "text", "logprobs"):
                assert getattr(drafted, name) == getattr(plain, name), (way, draft)
            results.append(drafted)
    return results
