"""Tree shapes that do not depend on what the drafter says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jetdraft.devices.best_tree import best_tree
from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.trees.shape import Shape, Tree

RANK_RATES = (0.63, 0.13, 0.06, 0.036, 0.024, 0.016, 0.013, 0.01)
"""How often the first, the second, ... coupled sibling is right
(docs/log/trees-and-verifiers.md)."""


class Static(Shape):
    """A fixed list of rows: `parents` has the parents of rows 1, 2, ...; 0 is the root.

    Siblings are picked in the order of the list, the best sibling first. Raises
    `OptionError` if a parent does not come before its row.

        Static([0, 0, 1])   # two children of the root, and one below the first
    """

    name = "static"
    kinds = frozenset(Kind) - {Kind.TOP_AND_ONE}

    def __init__(self, parents: Sequence[int]) -> None:
        if not parents:
            raise DraftingError("the tree has no rows; give the parent of each row")
        for row, parent in enumerate(parents, start=1):
            if not 0 <= parent < row:
                raise DraftingError(
                    f"row {row} of the tree has parent {parent}; parents come before "
                    f"their children, so give 0 to {row - 1}"
                )
        self.parents = parents
        self._numbers: dict[int, int] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the children that the list has for the answered rows."""
        if 0 in answers:
            # Maps each row of the tree to its number in the list.
            self._numbers = {0: 0}
        level = []
        for row, q in answers.items():
            parents, row_number = self.parents[: tree.budget], self._numbers[row]
            numbers = [n for n, parent in enumerate(parents, 1) if parent == row_number]
            rows = tree.add(row, q, tree.children_of(row, q, len(numbers)))
            self._numbers.update(zip(rows, numbers, strict=False))
            level += rows
        return [row for row in level if self._numbers[row] in self.parents]


class Best(Static):
    """The rows most likely to be accepted if siblings are right at `RANK_RATES`."""

    name = "best"

    def __init__(self) -> None:
        super().__init__((0,))

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Make the best list for the budget, and add the children that it has."""
        if 0 in answers:
            firsts = [RANK_RATES[0]] * tree.budget
            others = [rate / (1.0 - RANK_RATES[0]) for rate in RANK_RATES[1:]]
            self.parents, _ = best_tree(tree.budget, firsts, others)
        return super().grow(tree, answers)


class Kary(Shape):
    """A number of children for each level, for example (4, 2, 2) (MCSD, 2401.06706)."""

    name = "k-ary"
    kinds = frozenset(Kind)

    def __init__(self, branching: Sequence[int]) -> None:
        if not branching or min(branching) < 1:
            raise DraftingError(
                f"branching {list(branching)} is not a tree; give 1 or more per level"
            )
        self.branching = branching

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add a level: the children of each row, if all of them fit."""
        level = []
        for row, q in answers.items():
            # All or none, since a part of the siblings has another distribution.
            count = self.branching[tree.depths[row]]
            if count <= tree.room:
                level += tree.add(row, q, tree.children_of(row, q, count))
        deeper = [row for row in level if tree.depths[row] < len(self.branching)]
        return deeper if tree.room else []
