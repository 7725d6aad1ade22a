"""DySpec (2410.11744): grow where the drafter expects acceptance.

A row's reach is the chance, by the drafter, that the verifier comes to try it: its
parent's reach times the draft mass that its elder siblings left, and the row's child
is reached with that times the row's own share of the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.trees.shape import Shape, Tree

_KINDS = frozenset({Kind.DISTINCT, Kind.COUPLED, Kind.DETERMINISTIC})


@dataclass
class _Family:
    """Siblings in the order they would be tried, with each one's share of the rest."""

    tokens: list[int]
    shares: list[float]

    @classmethod
    def of(cls, tree: Tree, row: int, q: Distribution) -> _Family:
        tokens = tree.children_of(row, q, tree.budget)
        mass = dict(zip(q.ids.tolist(), q.probabilities.tolist(), strict=True))
        left, shares = 1.0, []
        for token in tokens:
            shares.append(min(1.0, mass[token] / max(left, 1e-12)))
            left -= mass[token]
        return cls(tokens, shares)


class Heap(Shape):
    """The rows with the largest reach, one drafter pass for each that has children."""

    name = "heap"
    kinds = _KINDS

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._families: dict[int, _Family] = {}

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """Add the most reachable rows until the drafter must be asked."""
        if 0 in found:
            self._heap, self._families = [(-1.0, 0, 0)], {}
        for row, q in found.items():
            self._families[row] = _Family.of(tree, row, q)
            tree.drawn_from[row] = q
        while self._heap and tree.room:
            value, row, rank = self._heap[0]
            if row not in self._families:
                return [row]  # its first child is next: what would it be?
            heapq.heappop(self._heap)
            self._try(tree, -value, row, rank)
        return []

    def _try(self, tree: Tree, reach: float, row: int, rank: int) -> None:
        """Add one sibling, and offer its own child and its next sibling."""
        family = self._families[row]
        if rank >= len(family.tokens):
            return
        share = family.shares[rank]
        q = tree.drawn_from[row]
        [child] = tree.add(row, q, [family.tokens[rank]])
        heapq.heappush(self._heap, (-reach * share, child, 0))
        heapq.heappush(self._heap, (-reach * (1.0 - share), row, rank + 1))


class ReachThreshold(Shape):
    """All rows with at least a reach of 1 / budget, a level per drafter pass."""

    name = "threshold"
    kinds = _KINDS

    def __init__(self) -> None:
        self._reach: dict[int, float] = {}

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """The children of a level, while their reach is large enough."""
        if 0 in found:
            self._reach = {0: 1.0}
        least = 1.0 / tree.budget
        fresh = []
        for row, q in found.items():
            family = _Family.of(tree, row, q)
            reach, count = self._reach[row], 0
            for share in family.shares:
                if reach < least or count == tree.room:
                    break
                self._reach[len(tree.tokens) + count] = reach * share
                reach *= 1.0 - share
                count += 1
            fresh += tree.add(row, q, family.tokens[:count])
        return [row for row in fresh if self._reach[row] >= least] if tree.room else []
