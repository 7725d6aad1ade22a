"""How often a drafter is right, by the place in a draft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums by the distance from the last known token: [slots] each.

    `right` counts places where the best guess is the target's choice. `reached` counts
    places before which all guesses are right, and `accepted` those that are right too.
    """

    lost: Tensor
    places: Tensor
    right: Tensor
    reached: Tensor
    accepted: Tensor


def sums_of(lost: Tensor, right: Tensor, far: Tensor, learned: Tensor) -> Sums:
    """Sums of k learned places by their distance `far` int64 [k].

    `learned` bool [..., slots] has k places that are true, in the order of the others.
    """
    slots = learned.shape[-1]

    def by_distance(numbers: Tensor) -> Tensor:
        empty = torch.zeros(slots, device=numbers.device)
        return empty.index_add(0, far, numbers.float())

    # A place that is not guessed stops no draft before it.
    good = torch.ones_like(learned)
    good[learned] = right
    before = good.cumprod(-1).roll(1, -1)
    before[..., 0] = 1
    reached = before[learned].bool()
    return Sums(
        by_distance(lost),
        by_distance(torch.ones_like(lost)),
        by_distance(right),
        by_distance(reached),
        by_distance(reached & right),
    )
