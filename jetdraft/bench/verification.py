"""Proving on this machine that no method changes the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetdraft.errors import OptionError
from jetdraft.runtime.model import Model
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.registry import AUTO, NONE, methods

_SETTINGS: tuple[dict[str, float | int], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 40, "top_p": 0.95},
)
_DRAFT_LENGTHS = (1, 2, 4, None)
_TOKENS = 96


@dataclass(frozen=True)
class Comparison:
    """One method against plain decoding: `first_difference` is None if they agree."""

    method: str
    num_draft_tokens: int | None
    settings: dict[str, float | int]
    tokens: int
    first_difference: int | None


def compare_methods(model: Model) -> Iterator[Comparison]:
    """Generate with every method, greedy and sampling, and compare token by token."""
    prompt = _prompt(model)
    room = model.bundle.target.contract.capacity - len(prompt)
    count = min(_TOKENS, room)
    for settings in _SETTINGS:
        options: dict[str, Any] = {
            **settings,
            "max_new_tokens": count,
            "ignore_eos": True,
        }
        plain = model.generate(token_ids=prompt, method=NONE, **options).token_ids
        for name, length, way in _ways(model):
            ids = model.generate(token_ids=prompt, **way, **options).token_ids
            yield Comparison(name, length, settings, len(plain), _differ(plain, ids))


def _ways(model: Model) -> Iterator[tuple[str, int | None, dict[str, Any]]]:
    """A name, a draft length and the options of each way to decode."""
    for name in model.methods:
        if name == NONE or not _runs(model, Drafting(name)):
            continue
        for length in _DRAFT_LENGTHS:
            yield name, length, {"method": name, "num_draft_tokens": length}
        for settings in methods()[name].samples:
            if _runs(model, Drafting(name, settings=settings)):
                words = ",".join(f"{key}={value}" for key, value in settings.items())
                way = {"method": name, "drafting": settings}
                yield f"{name} {words}", None, way
    yield AUTO, None, {"method": AUTO}


def _runs(model: Model, drafting: Drafting) -> bool:
    """Whether the bundle has what it takes, and this machine keeps it exact."""
    try:
        model.planner.proposer_set(drafting)
        model.planner.target(drafting)
    except OptionError:
        return False
    return True


def _prompt(model: Model) -> list[int]:
    """Repetitive, so that lookup has something to find."""
    contract = model.bundle.target.contract
    words = np.random.default_rng(5).integers(0, contract.vocab_size, 12)
    return [int(x) for x in np.tile(words, 3)[: max(1, contract.capacity // 4)]]


def _differ(one: list[int], other: list[int]) -> int | None:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
