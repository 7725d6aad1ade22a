"""Tree shapes that grow where the drafter expects acceptance (DySpec, 2410.11744).

The reach of a row is the chance, by the drafter's probabilities q, that the verifier
comes to try the row. Siblings x_1, x_2, ... are tried in turn:

    share(x_i) = q(x_i) / (1 - q(x_1) - ... - q(x_{i-1}))     of the mass that is left
    reach(x_1)          = reach of the parent, if the parent is accepted
    reach(x_{i+1})      = reach(x_i) (1 - share(x_i))
    reach(x_i's child)  = reach(x_i) share(x_i)
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
    """Siblings in the order they are tried, and the share of each of the mass left."""

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
    """The rows with the largest reach; one drafter pass for each row with children."""

    name = "heap"
    kinds = _KINDS

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # -reach, parent, rank
        self._families: dict[int, _Family] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the rows with the largest reach until the drafter must be asked."""
        if 0 in answers:
            self._heap, self._families = [(-1.0, 0, 0)], {}
        for row, q in answers.items():
            self._families[row] = _Family.of(tree, row, q)
            tree.drawn_from[row] = q
        while self._heap and tree.room:
            negative_reach, row, rank = self._heap[0]
            if row not in self._families:
                return [row]  # a child of it is next, and its tokens are unknown
            heapq.heappop(self._heap)
            self._add_sibling(tree, -negative_reach, row, rank)
        return []

    def _add_sibling(self, tree: Tree, reach: float, row: int, rank: int) -> None:
        """Add one child of a row; its child and its next sibling enter the heap."""
        family = self._families[row]
        if rank >= len(family.tokens):
            return
        share = family.shares[rank]
        q = tree.drawn_from[row]
        [child] = tree.add(row, q, [family.tokens[rank]])
        heapq.heappush(self._heap, (-reach * share, child, 0))
        heapq.heappush(self._heap, (-reach * (1.0 - share), row, rank + 1))


class ReachThreshold(Shape):
    """All rows with a reach of at least 1 / budget; one drafter pass for each level."""

    name = "threshold"
    kinds = _KINDS

    def __init__(self) -> None:
        self._reach: dict[int, float] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the children of a level while their reach is large enough."""
        if 0 in answers:
            self._reach = {0: 1.0}
        least = 1.0 / tree.budget
        fresh = []
        for row, q in answers.items():
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
