"""What a draft model drafts and how it is verified, checked before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetdraft.contract import WIDEST
from jetdraft.errors import DraftError, OptionError, VerifierError
from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling.verifiers import VERIFIERS, Verifier
from jetdraft.runtime.trees import (
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
MAX_DRAFT_TOKENS = WIDEST - 1
"""The longest draft a caller may ask for: the widest decoding pass less the root."""

_DEFAULT_ROWS = 7
_ADAPTIVE = {
    shape.name: shape for shape in (Best, Heap, ReachThreshold, Rerank, Comb, Merged)
}
TREES = (AUTO, CHAIN, *_ADAPTIVE, Kary.name, Static.name)
"""The shapes of a draft."""

SIBLINGS = tuple(kind.value for kind in Kind)
"""The ways to pick a row's children."""


@dataclass(frozen=True)
class Drafting:
    """The shape of drafts, their siblings, and the verifier.

    An "auto" tree is a chain, or where a controller chooses the length and the method
    can branch, whatever promises most.
    `branching` belongs to k-ary trees and `tree_parents` to static ones: the parent of
    rows 1, 2, ..., 0 being the root.

        Drafting(tree="k-ary", branching=(3, 2), siblings="without-replacement",
                 verifier="recursive")
    """

    tree: str = AUTO
    siblings: str = Kind.COUPLED.value
    branching: Sequence[int] | None = None
    tree_parents: Sequence[int] | None = None
    verifier: str = "walk"

    def __post_init__(self) -> None:
        _one_of("tree", self.tree, TREES, DraftError)
        _one_of("siblings", self.siblings, SIBLINGS, DraftError)
        _one_of("verifier", self.verifier, tuple(VERIFIERS), VerifierError)
        for name, given, tree in (
            ("branching", self.branching, Kary.name),
            ("tree parents", self.tree_parents, Static.name),
        ):
            if (given is not None) != (self.tree == tree):
                raise OptionError(f"{name} and a {tree} tree go together; give both")
            if given is not None and not _are_integers(given):
                raise OptionError(f"{name} must be a list of integers, as in [2, 1]")
        if not self.is_chain and self.kind not in self.shape.kinds:
            allowed = ", ".join(sorted(kind.value for kind in self.shape.kinds))
            raise DraftError(
                f"a {self.tree} tree cannot have {self.siblings} siblings; choose "
                f"{allowed}"
            )
        if self.is_chain and self.kind is not Kind.COUPLED:
            raise DraftError(
                f"a chain is drafted with coupled noise; for {self.siblings} drafts "
                "use --method draft --tree k-ary --branching 1,1,1"
            )
        if self.verifier == "rejection" and not self._is_single:
            raise VerifierError(
                "verifier 'rejection' takes one child per row; use --tree k-ary "
                "--branching 1,1,1 --siblings with-replacement, or verifier 'recursive'"
            )
        if self.rows > MAX_DRAFT_TOKENS:
            raise DraftError(
                f"a tree of {self.rows} rows is wider than a pass; draft at most "
                f"{MAX_DRAFT_TOKENS}"
            )

    @property
    def is_chain(self) -> bool:
        """Whether drafts do not branch, unless the controller would have it."""
        return self.tree in (AUTO, CHAIN)

    @property
    def may_branch(self) -> bool:
        """Whether a controller may ask for trees."""
        return self.tree == AUTO and self.verifier == "walk"

    @property
    def _is_single(self) -> bool:
        """Whether no row has two children."""
        parents = self.tree_parents or ()
        return (
            self.is_chain
            or (self.branching is not None and max(self.branching) == 1)
            or (bool(parents) and len(set(parents)) == len(parents))
        )

    @property
    def kind(self) -> Kind:
        """How siblings are picked."""
        return Kind(self.siblings)

    @property
    def checker(self) -> Verifier:
        """The verifier itself."""
        return VERIFIERS[self.verifier]

    @property
    def shape(self) -> Shape:
        """A fresh shape."""
        if self.branching is not None:
            return Kary(self.branching)
        if self.tree_parents is not None:
            return Static(self.tree_parents)
        shape: Any = _ADAPTIVE[self.tree]()
        return shape  # type: ignore[no-any-return]

    @property
    def rows(self) -> int:
        """The rows of a tree, where its shape or a default decides."""
        if self.branching is not None:
            return sum(itertools.accumulate(self.branching, lambda a, b: a * b))
        if self.tree_parents is not None:
            return len(self.tree_parents)
        return _DEFAULT_ROWS


def _are_integers(given: object) -> bool:
    return isinstance(given, Sequence) and all(isinstance(x, int) for x in given)


def _one_of(
    what: str, given: str, known: Sequence[str], error: type[Exception]
) -> None:
    if given not in known:
        raise error(f"unknown {what} {given!r}; choose {', '.join(known)}")
