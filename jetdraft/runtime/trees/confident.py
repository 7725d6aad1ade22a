"""Shapes that follow how sure the drafter is; any pruning looks at probabilities only.

They are for siblings by rank or coupled ones, verified by the walk: rows of a sampled
draft must not be dropped for what they turned out to be.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.trees.shape import Shape, Tree

_KINDS = frozenset({Kind.DETERMINISTIC, Kind.COUPLED})


def _log(q: Distribution, token: int) -> float:
    return float(np.log(q.probabilities[q.ids == token][0]))


class Rerank(Shape):
    """Expand the best rows of each level, then keep the best of all (EAGLE-2)."""

    name = "rerank"
    kinds = _KINDS

    def __init__(self, breadth: int = 6, depth: int = 5) -> None:
        self.breadth = breadth
        self.depth = depth
        self._scores: list[float] = []

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """`breadth` children each; the best `breadth` of the level go on."""
        if 0 in found:
            self._scores = [0.0]
        fresh = []
        for row, q in found.items():
            tokens = tree.children_of(row, q, self.breadth)
            fresh += tree.add(row, q, tokens)
            self._scores += [self._scores[row] + _log(q, token) for token in tokens]
        if not fresh or tree.depths[fresh[0]] >= self.depth:
            return []
        fresh.sort(key=lambda row: -self._scores[row])
        return sorted(fresh[: self.breadth])

    def finish(self, tree: Tree) -> Rows:
        """The best rows; ancestors are among them, since scores only fall."""
        order = sorted(range(len(tree.tokens)), key=lambda r: (-self._scores[r], r))
        kept = sorted(order[: tree.budget + 1])
        place = {row: i for i, row in enumerate(kept)}
        parents = [-1] + [place[tree.parents[row]] for row in kept[1:]]
        return Rows([tree.tokens[row] for row in kept], parents, tree.kind)


class Comb(Shape):
    """A chain with more siblings where the drafter is less sure (CaPE, 2402.02082)."""

    name = "comb"
    kinds = _KINDS
    EXTRA = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
    """Siblings beside the chain, up to that probability of the drafter's best."""

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """The siblings of one place; the first of them goes on."""
        [(row, q)] = found.items()
        sure = float(q.probabilities.max())
        extra = next(count for limit, count in self.EXTRA if sure <= limit + 1e-9)
        rows = tree.add(row, q, tree.children_of(row, q, min(1 + extra, tree.room)))
        deep = tree.depths[rows[0]] >= self.depth
        return [] if deep or not tree.room else rows[:1]


class Merged(Shape):
    """Hypotheses that come to the same words share what follows (GSD, 2407.16207).

    A token that repeats another row's last `repeat` tokens is not drafted further: its
    row points to the other one, and the graph is unrolled to a tree in the end.
    """

    name = "merged"
    kinds = _KINDS

    def __init__(
        self,
        breadth: int = 3,
        depth: int = 5,
        repeat: int = 1,
        sibling_threshold: float = 0.1,
        threshold: float = 0.1,
    ) -> None:
        self.breadth = breadth
        self.depth = depth
        self.repeat = repeat
        self.sibling_threshold = sibling_threshold
        self.threshold = threshold
        self._same: dict[int, int] = {}

    def grow(self, tree: Tree, found: Mapping[int, Distribution]) -> list[int]:
        """A level of children; those that are sure enough and new go on."""
        if 0 in found:
            self._same = {}
        live = []
        for row, q in found.items():
            if not tree.room:
                break
            tokens = tree.children_of(row, q, self.breadth)
            chances = [float(np.exp(_log(q, token))) for token in tokens]
            least = self.sibling_threshold * max(chances, default=0.0)
            kept = [t for t, c in zip(tokens, chances, strict=True) if c >= least]
            rows = tree.add(row, q, kept[: tree.room])
            sure = dict(zip(tokens, chances, strict=True))
            for fresh in rows:
                other = self._repeated(tree, fresh)
                if other is not None:
                    self._same[fresh] = other
                elif sure[tree.tokens[fresh]] >= self.threshold:
                    live.append(fresh)
        return [row for row in live if tree.depths[row] < self.depth]

    def _repeated(self, tree: Tree, row: int) -> int | None:
        """An earlier row off this one's path with the same last tokens."""
        path = tree.path(row)
        recent = [tree.tokens[r] for r in path[: 1 + self.repeat]]
        for other in range(1, row):
            if other in path or other in self._same:
                continue
            if [tree.tokens[r] for r in tree.path(other)[: len(recent)]] == recent:
                return other
        return None

    def finish(self, tree: Tree) -> Rows:
        """Unroll: a row that repeats another gets that one's children too.

        What was drafted comes first; copies fill what is left of the budget.
        """
        below: dict[int, list[int]] = {}
        for row, parent in enumerate(tree.parents[1:], start=1):
            below.setdefault(parent, []).append(row)
        tokens, parents = list(tree.tokens), list(tree.parents)
        source = list(range(len(tokens)))
        for at, row in enumerate(source):
            drafted = at < len(tree.tokens) and row not in self._same
            copied = [] if drafted else below.get(self._same.get(row, row), [])
            for child in copied:
                if len(tokens) <= tree.budget:
                    tokens.append(tree.tokens[child])
                    parents.append(at)
                    source.append(child)
        return Rows(tokens, parents, tree.kind)
