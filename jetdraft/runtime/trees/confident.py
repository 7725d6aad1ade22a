"""Tree shapes that follow how sure the drafter is of each token.

They drop rows by probability, so their siblings must come by rank or be coupled, and
the walk must verify them: dropping rows of a draft that was sampled would bias it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.trees.shape import Shape, Tree

_KINDS = frozenset({Kind.DETERMINISTIC, Kind.COUPLED})


def _log_probability(q: Distribution, token: int) -> float:
    return float(np.log(q.probabilities[q.ids == token][0]))


class Rerank(Shape):
    """Expand the best rows of each level, then keep the best rows of all (EAGLE-2)."""

    name = "rerank"
    kinds = _KINDS

    def __init__(self, breadth: int = 6, depth: int = 5) -> None:
        self.breadth = breadth
        self.depth = depth
        self._scores: list[float] = []

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add `breadth` children each; the best `breadth` rows of the level go on."""
        if 0 in answers:
            self._scores = [0.0]
        fresh = []
        for row, q in answers.items():
            tokens = tree.children_of(row, q, self.breadth)
            fresh += tree.add(row, q, tokens)
            score = self._scores[row]
            self._scores += [score + _log_probability(q, token) for token in tokens]
        if not fresh or tree.depths[fresh[0]] >= self.depth:
            return []
        fresh.sort(key=lambda row: -self._scores[row])
        return sorted(fresh[: self.breadth])

    def finish(self, tree: Tree) -> Rows:
        """The best rows; their ancestors are among them, since scores only fall."""
        order = sorted(range(len(tree.tokens)), key=lambda r: (-self._scores[r], r))
        kept = sorted(order[: tree.budget + 1])
        return Rows(tree.tokens, tree.parents, tree.kind).only(kept)


class Comb(Shape):
    """A chain with more siblings where the drafter is less sure (CaPE, 2402.02082)."""

    name = "comb"
    kinds = _KINDS
    EXTRA = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
    """Siblings beside the chain's row, up to each probability of the drafter's best."""

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the siblings of one place; the first sibling goes on."""
        [(row, q)] = answers.items()
        best = float(q.probabilities.max())
        extra = next(count for limit, count in self.EXTRA if best <= limit + 1e-9)
        rows = tree.add(row, q, tree.children_of(row, q, min(1 + extra, tree.room)))
        deep = tree.depths[rows[0]] >= self.depth
        return [] if deep or not tree.room else rows[:1]


class Merged(Shape):
    """Branches that end in the same tokens share what follows (GSD, 2407.16207).

    A row whose last `repeat` + 1 tokens equal those of an earlier row is not drafted
    further. In the end it gets copies of the earlier row's children.
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
        self._repeats: dict[int, int] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add a level of children; those go on that are probable enough and new."""
        if 0 in answers:
            self._repeats = {}
        live = []
        for row, q in answers.items():
            if not tree.room:
                break
            tokens = tree.children_of(row, q, self.breadth)
            chances = {t: float(np.exp(_log_probability(q, t))) for t in tokens}
            least = self.sibling_threshold * max(chances.values(), default=0.0)
            kept = [token for token in tokens if chances[token] >= least]
            for fresh in tree.add(row, q, kept[: tree.room]):
                repeated = self._repeated(tree, fresh)
                if repeated is not None:
                    self._repeats[fresh] = repeated
                elif chances[tree.tokens[fresh]] >= self.threshold:
                    live.append(fresh)
        return [row for row in live if tree.depths[row] < self.depth]

    def _repeated(self, tree: Tree, row: int) -> int | None:
        """An earlier row with the same last tokens that is not an ancestor of `row`."""
        path = tree.path(row)
        recent = [tree.tokens[r] for r in path[: 1 + self.repeat]]
        for other in range(1, row):
            if other in path or other in self._repeats:
                continue
            if [tree.tokens[r] for r in tree.path(other)[: len(recent)]] == recent:
                return other
        return None

    def finish(self, tree: Tree) -> Rows:
        """All drafted rows, then copies below rows that repeat another, if they fit."""
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(tree.parents[1:], start=1):
            children.setdefault(parent, []).append(row)
        tokens, parents = list(tree.tokens), list(tree.parents)
        originals = list(range(len(tokens)))
        # The list grows while it is read: copies get copies of children too.
        for row, original in enumerate(originals):
            if row < len(tree.tokens) and row not in self._repeats:
                continue  # its children were drafted
            for child in children.get(self._repeats.get(original, original), []):
                if len(tokens) <= tree.budget:
                    tokens.append(tree.tokens[child])
                    parents.append(row)
                    originals.append(child)
        return Rows(tokens, parents, tree.kind)
