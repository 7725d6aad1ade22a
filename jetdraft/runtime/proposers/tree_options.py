"""Options of methods that can draft trees: shape, siblings and verifier."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from jetdraft.contracts.constants import WIDEST
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.proposers.method import MethodOptions, check_choice
from jetdraft.runtime.trees.shapes import SHAPES, Kary, Shape, Static

AUTO, CHAIN = "auto", "chain"
DEFAULT_SIZE = 7  # Rows of a tree whose options give no size.

TREES = (AUTO, CHAIN, *SHAPES, Kary.name, Static.name)  # The values of `tree`.
SIBLINGS = tuple(kind.value for kind in Kind)  # The values of `siblings`.


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

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        check_choice("tree", self.tree, TREES)
        check_choice("siblings", self.siblings, SIBLINGS)
        for key, value, tree in (
            ("branching", self.branching, Kary.name),
            ("tree_parents", self.tree_parents, Static.name),
        ):
            if (value is not None) != (self.tree == tree):
                yield f"drafting options tree={tree} and {key} go together; give both"
        if self.branched and self.kind not in self.shape.kinds:
            allowed = ", ".join(sorted(kind.value for kind in self.shape.kinds))
            yield (
                f"a {self.tree} tree cannot have {self.siblings} siblings; choose "
                f"{allowed}"
            )
        if not self.branched and self.kind is not Kind.COUPLED:
            yield (
                f"a chain is drafted with coupled noise; for {self.siblings} drafts "
                "give tree=k-ary and branching=1,1,1"
            )
        parents = self.tree_parents or ()
        has_single_children = (
            not self.branched
            or (self.branching is not None and max(self.branching) == 1)
            or (bool(parents) and len(set(parents)) == len(parents))
        )
        if self.checker.single_child and not has_single_children:
            yield (
                f"verifier {self.verifier!r} takes one child per row; give tree=k-ary, "
                "branching=1,1,1 and siblings=with-replacement, or verifier=recursive"
            )
        size, most = self.draft_size, WIDEST - 1
        if size is not None and size > most:
            yield f"a tree of {size} rows is wider than a pass; draft at most {most}"

    @property
    def branched(self) -> bool:
        return self.tree not in (AUTO, CHAIN)

    @property
    def may_branch(self) -> bool:
        return self.tree == AUTO and super().may_branch

    @property
    def kind(self) -> Kind:
        """The rule that picks the children of a row, as a `Kind`."""
        return Kind(self.siblings)

    @property
    def shape(self) -> Shape:
        """A new shape as `tree` names it, for options that are `branched`."""
        if self.branching is not None:
            return Kary(self.branching)
        if self.tree_parents is not None:
            return Static(self.tree_parents)
        return SHAPES[self.tree]()

    @property
    def size_is_fixed(self) -> bool:
        return self.branching is not None or self.tree_parents is not None

    @property
    def draft_size(self) -> int | None:
        if self.branching is not None:
            return sum(itertools.accumulate(self.branching, lambda a, b: a * b))
        if self.tree_parents is not None:
            return len(self.tree_parents)
        return DEFAULT_SIZE if self.branched else None
