"""A draft tree while it grows, and the interface of the classes that shape it."""

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
    """The rows drafted so far; row 0 is the root.

    `kind` says how children are picked, `position` is the absolute position of the
    root's children, and `budget` is the largest number of drafted rows.
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
        """How many rows may still be drafted."""
        return self.budget + 1 - len(self.tokens)

    def children_of(self, row: int, q: Distribution, count: int) -> list[int]:
        """The tokens of the first `count` children of a row, drawn from `q`."""
        position = self.position + self.depths[row]
        # Unique in a generation, since the root's position grows with every round.
        family = (self.position << 8) + row
        return siblings(self.kind, q, count, self.sampling, position, family)

    def add(self, row: int, q: Distribution, tokens: Sequence[int]) -> list[int]:
        """Add children below a row; returns their rows."""
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
        """The whole tree as rows to verify."""
        return Rows(self.tokens, self.parents, self.kind, self.drawn_from)


class Shape(ABC):
    """Decides which rows a draft has; `kinds` are the kinds of siblings it can use."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]]

    @abstractmethod
    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add rows below the rows that the drafter has just answered for.

        `answers` maps these to the drafter's distribution of the next token; the first
        call has only the root, row 0. Returns the rows to ask the drafter about next;
        an empty list ends the draft.
        """

    def finish(self, tree: Tree) -> Rows:
        """The rows to verify, at most `tree.budget` below the root."""
        return tree.rows()
