"""Options of methods that can draft trees: shape, siblings and verifier."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from jetdraft.contracts.constants import WIDEST
from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.proposers.method import MethodOptions, check_choice
from jetdraft.runtime.trees.shapes import (
    Best,
    Comb,
    Heap,
    Kary,
    Merged,
    ReachThreshold,
    Rerank,
    Shape,
    Static,
)

AUTO, CHAIN = "auto", "chain"
DEFAULT_SIZE = 7
"""Rows of a tree whose options give no size."""

ADAPTIVE: dict[str, type[Best | Heap | ReachThreshold | Rerank | Comb | Merged]] = {
    shape.name: shape for shape in (Best, Heap, ReachThreshold, Rerank, Comb, Merged)
}
TREES = (AUTO, CHAIN, *ADAPTIVE, Kary.name, Static.name)
SIBLINGS = tuple(kind.value for kind in Kind)


@dataclass(frozen=True)
class TreeOptions(MethodOptions):
    """The shape of a draft, how siblings are picked, and the verifier.

    tree          a name in `TREES`; "auto" lets a controller choose a chain or a tree
    siblings      how the children of a row are picked, a name in `SIBLINGS`
    branching     children of a row at each level, for a k-ary tree
    tree_parents  the parents of rows 1, 2, ..., where 0 is the root, for a static tree

        TreeOptions("recursive", tree="k-ary", branching=(3, 2),
                    siblings="without-replacement")
    """

    tree: str = AUTO
    siblings: str = Kind.COUPLED.value
    branching: tuple[int, ...] | None = None
    tree_parents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tree", self.tree, TREES)
        check_choice("siblings", self.siblings, SIBLINGS)
        for key, value, tree in (
            ("branching", self.branching, Kary.name),
            ("tree_parents", self.tree_parents, Static.name),
        ):
            if (value is not None) != (self.tree == tree):
                raise DraftingError(
                    f"drafting options tree={tree} and {key} go together; give both"
                )
        self._check_siblings()
        if self.draft_size is not None and self.draft_size >= WIDEST:
            raise DraftingError(
                f"a tree of {self.draft_size} rows is wider than a pass; draft at most "
                f"{WIDEST - 1}"
            )

    def _check_siblings(self) -> None:
        """Refuse siblings that the shape or the verifier cannot use."""
        if self.branched and self.kind not in self.shape.kinds:
            allowed = ", ".join(sorted(kind.value for kind in self.shape.kinds))
            raise DraftingError(
                f"a {self.tree} tree cannot have {self.siblings} siblings; choose "
                f"{allowed}"
            )
        if not self.branched and self.kind is not Kind.COUPLED:
            raise DraftingError(
                f"a chain is drafted with coupled noise; for {self.siblings} drafts "
                "give tree=k-ary and branching=1,1,1"
            )
        if self.checker.single_child and not self._has_single_children:
            raise DraftingError(
                f"verifier {self.verifier!r} takes one child per row; give tree=k-ary, "
                "branching=1,1,1 and siblings=with-replacement, or verifier=recursive"
            )

    @property
    def _has_single_children(self) -> bool:
        """Whether no row has two children."""
        parents = self.tree_parents or ()
        return (
            not self.branched
            or (self.branching is not None and max(self.branching) == 1)
            or (bool(parents) and len(set(parents)) == len(parents))
        )

    @property
    def branched(self) -> bool:
        """Whether the options give a tree's shape."""
        return self.tree not in (AUTO, CHAIN)

    @property
    def may_branch(self) -> bool:
        """Whether a controller may ask for trees."""
        return self.tree == AUTO and super().may_branch

    @property
    def kind(self) -> Kind:
        """How siblings are picked."""
        return Kind(self.siblings)

    @property
    def shape(self) -> Shape:
        """A new shape, if drafts are `branched`."""
        if self.branching is not None:
            return Kary(self.branching)
        if self.tree_parents is not None:
            return Static(self.tree_parents)
        return ADAPTIVE[self.tree]()

    @property
    def size_is_fixed(self) -> bool:
        """Whether the shape decides how many rows a draft has."""
        return self.branching is not None or self.tree_parents is not None

    @property
    def draft_size(self) -> int | None:
        """The rows of a tree; None for chains, whose length a controller chooses."""
        if self.branching is not None:
            return sum(itertools.accumulate(self.branching, lambda a, b: a * b))
        if self.tree_parents is not None:
            return len(self.tree_parents)
        return DEFAULT_SIZE if self.branched else None
