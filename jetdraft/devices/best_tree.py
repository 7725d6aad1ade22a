"""The tree of drafted rows that is most likely to be accepted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_tree(
    budget: int, firsts: Sequence[float], others: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Return the parents of the `budget` likeliest rows, and the chance of each row.

    `firsts[d]` is the chance that the first sibling at depth d is right; `others` are
    the chances of the second, third, ... sibling where the first is wrong. Rows come
    likeliest first, numbered from 1; 0 is the root. Greedy insertion is optimal where
    a row's chance is the product along its path (Medusa, 2401.10774).
    """
    parents, depths, chances = list[int](), [0], [1.0]
    heap = [(-firsts[0], 0, 0)]
    while heap and len(parents) < budget:
        chance, parent, rank = heapq.heappop(heap)
        row, depth = len(depths), depths[parent] + 1
        parents.append(parent)
        depths.append(depth)
        chances.append(-chance)
        if depth < len(firsts):
            heapq.heappush(heap, (chance * firsts[depth], row, 0))
        if rank < len(others):
            wrong = 1.0 - firsts[depth - 1]
            sibling = chances[parent] * wrong * others[rank]
            heapq.heappush(heap, (-sibling, parent, rank + 1))
    return parents, chances[1:]
