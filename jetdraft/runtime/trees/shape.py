"""A draft tree while it grows, its siblings, and the interface of its shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.sampling.chooser import Sampling


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


_SALT = 0x6A09E667F3BCC908
"""Makes the draws of a draft independent of the noise that chooses target tokens."""


def siblings(
    kind: Kind,
    q: Distribution,
    count: int,
    sampling: Sampling,
    position: int,
    family: int = 0,
) -> list[int]:
    """At most `count` tokens from `q`, for `position`, in the order to try them.

    `q` lists its tokens best first. The k best tokens by log q + noise are k draws
    without replacement (Gumbel-top-k, Kool et al. 1903.06059). With the noise of the
    target they are the coupled siblings; in greedy decoding these are the k best of q.

    Families with different numbers draw independently: a shape may look at the tokens
    of one family to decide whether another family grows at all, without a bias.
    """
    salt = sampling.seed + _SALT + (family << 8)
    if kind is Kind.REPLACED:
        return [q.draw(salt + i, position) for i in range(count)]
    if kind is Kind.TOP_AND_ONE:
        return _top_and_one(q, count, salt, position)
    count = min(count, int(np.count_nonzero(q.probabilities)))
    coupled = kind is Kind.COUPLED and sampling.temperature > 0
    if kind is Kind.DISTINCT or coupled:
        seed = sampling.seed if coupled else salt
        order = np.argsort(-q.scores(seed, position), kind="stable")
        return [int(token) for token in q.ids[order[:count]]]
    return [int(token) for token in q.ids[:count]]


def _top_and_one(q: Distribution, count: int, seed: int, position: int) -> list[int]:
    """The best `count` - 1 tokens, then one token drawn from the others."""
    fixed = [int(token) for token in q.ids[: count - 1]]
    rest = Distribution(q.ids[count - 1 :], q.probabilities[count - 1 :])
    if not rest.probabilities.any():
        return fixed
    return [*fixed, rest.draw(seed, position)]
