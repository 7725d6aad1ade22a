"""Shapes that are known before anything is drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jetdraft.best_tree import best_tree
from jetdraft.errors import DraftError
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.trees.shape import Shape, Tree

RANK_RATES = (0.63, 0.13, 0.06, 0.036, 0.024, 0.016, 0.013, 0.01)
"""How often the first, second, ... coupled sibling is right (docs/verifiers.md)."""


class Sparse(Shape):
    """A fixed list of rows; a row's n-th child here is its n-th sibling.

    `parents` names each row's parent, 0 the root, as in "0,0,1".
    """

    name = "static"
    kinds = frozenset(Kind) - {Kind.TOP_AND_ONE}

    def __init__(self, parents: Sequence[int]) -> None:
        if not parents:
            raise DraftError("the tree has no rows; give a parent for each")
        for row, parent in enumerate(parents, start=1):
            if not 0 <= parent < row:
                raise DraftError(
                    f"row {row} of the tree has parent {parent}; parents come before "
                    f"their children, so give 0 to {row - 1}"
                )
        self.parents = parents
        self._made: dict[int, int] = {}

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """Fill in the children of the answered rows."""
        if 0 in found:
            self._made = {0: 0}
        made = {row: planned for planned, row in self._made.items()}
        fresh: list[tuple[int, int]] = []
        for row, q in found.items():
            planned = self.parents[: tree.budget]
            below = [i for i, p in enumerate(planned, 1) if p == made[row]]
            tokens = tree.children_of(row, q, len(below))
            rows = tree.add(row, q, tokens)
            self._made.update(zip(below, rows, strict=False))
            fresh += zip(below, rows, strict=False)
        return [row for planned, row in fresh if planned in self.parents]


class Best(Sparse):
    """The rows most likely to be accepted, were siblings right at `RANK_RATES`."""

    name = "best"

    def __init__(self) -> None:
        super().__init__((0,))

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """As the list for this budget says."""
        if 0 in found:
            firsts = [RANK_RATES[0]] * tree.budget
            others = [rate / (1.0 - RANK_RATES[0]) for rate in RANK_RATES[1:]]
            self.parents, _ = best_tree(tree.budget, firsts, others)
        return super().grow(tree, found)


class Kary(Shape):
    """So many children per level (MCSD, 2401.06706), as in (4, 2, 2)."""

    name = "k-ary"
    kinds = frozenset(Kind)

    def __init__(self, branching: Sequence[int]) -> None:
        if not branching or min(branching) < 1:
            raise DraftError(
                f"branching {list(branching)} is no tree; give 1 or more per level"
            )
        self.branching = branching

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """A level, or what fits of it."""
        fresh = []
        for row, q in found.items():
            # A family is drafted whole or not at all: a part has another law.
            count = self.branching[tree.depths[row]]
            if count <= tree.room:
                fresh += tree.add(row, q, tree.children_of(row, q, count))
        deeper = [row for row in fresh if tree.depths[row] < len(self.branching)]
        return deeper if tree.room else []
