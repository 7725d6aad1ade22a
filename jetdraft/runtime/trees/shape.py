"""A draft tree while it grows, and what decides its shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.sampling.chooser import Sampling
from jetdraft.runtime.trees.siblings import siblings


@dataclass
class Tree:
    """The rows drafted so far; row 0 is the root, whose children sit at `position`.

    `kind` says how children are picked and `budget` how many rows may be drafted.
    """

    kind: Kind
    sampling: Sampling
    position: int
    budget: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    drawn_from: dict[int, Distribution] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Rows that may still be drafted."""
        return self.budget + 1 - len(self.tokens)

    def children_of(self, row: int, q: Distribution, count: int) -> list[int]:
        """The tokens that would be the row's first `count` children."""
        position = self.position + self.depths[row]
        # No two families of a generation have the same number: the root moves on.
        family = (self.position << 8) + row
        return siblings(self.kind, q, count, self.sampling, position, family)

    def add(self, row: int, q: Distribution, tokens: Sequence[int]) -> list[int]:
        """Add children below a row; their rows."""
        self.drawn_from[row] = q
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [row] * len(tokens)
        self.depths += [self.depths[row] + 1] * len(tokens)
        return list(range(first, len(self.tokens)))

    def path(self, row: int) -> list[int]:
        """The row and its ancestors, nearest first."""
        path = [row]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path

    def rows(self) -> Rows:
        """All of it, ready to be verified."""
        return Rows(self.tokens, self.parents, self.kind, self.drawn_from)


class Shape(ABC):
    """Decides which rows a draft has; works for the `kinds` of siblings it names."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]]

    @abstractmethod
    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """Add rows below those that the drafter has just answered for.

        `found` maps them to the drafter's distribution of their next token, at first
        only the root. The rows to ask the drafter about next come back; none ends it.
        """

    def finish(self, tree: Tree) -> Rows:
        """The rows to verify, at most `tree.budget` below the root."""
        return tree.rows()
