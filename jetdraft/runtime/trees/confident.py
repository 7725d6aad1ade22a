"""Tree shapes that follow how sure the drafter is of each token.

These shapes drop rows by their probability. To drop rows of a sampled draft would bias
the text, so siblings must be picked by rank or be coupled, and the walk must verify.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jetdraft.runtime.drafts.distribution import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.trees.shape import Shape, Tree

_KINDS = frozenset({Kind.DETERMINISTIC, Kind.COUPLED})


def _log_probability(q: Distribution, token: int) -> float:
    """The log probability of a token that `q` lists."""
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
        """Add `breadth` children to each row; the level's best `breadth` rows go on."""
        if 0 in answers:
            self._scores = [0.0]
        level = []
        for row, q in answers.items():
            tokens = tree.children_of(row, q, self.breadth)
            level += tree.add(row, q, tokens)
            score = self._scores[row]
            self._scores += [score + _log_probability(q, token) for token in tokens]
        if not level or tree.depths[level[0]] >= self.depth:
            return []
        level.sort(key=lambda row: -self._scores[row])
        return sorted(level[: self.breadth])

    def finish(self, tree: Tree) -> Rows:
        """The best rows of all levels.

        A row scores no better than its parent, so the ancestors of a row stay too.
        """
        order = sorted(range(len(tree.tokens)), key=lambda r: (-self._scores[r], r))
        best = sorted(order[: tree.budget + 1])
        return Rows(tree.tokens, tree.parents, tree.kind).only(best)


class Comb(Shape):
    """A chain with more siblings where the drafter is less sure (CaPE, 2402.02082)."""

    name = "comb"
    kinds = _KINDS
    EXTRA = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
    """Pairs of a probability and a number of further siblings.

    The first pair counts whose probability is not below that of the drafter's best
    token.
    """

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the children of the chain's last row; the first child goes on."""
        [(row, q)] = answers.items()
        best = float(q.probabilities.max())
        extra = next(count for limit, count in self.EXTRA if best <= limit + 1e-9)
        rows = tree.add(row, q, tree.children_of(row, q, min(1 + extra, tree.room)))
        is_deepest = tree.depths[rows[0]] >= self.depth
        return [] if is_deepest or not tree.room else rows[:1]


class Merged(Shape):
    """Branches that end in the same tokens share what follows (GSD, 2407.16207).

    If the last `repeat` + 1 tokens of two branches are equal, only the earlier branch
    is drafted further. In the end the later branch gets copies of its rows.

    A child is added if its probability is at least `sibling_threshold` times that of
    the best child, and goes on if its probability is at least `threshold`.
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
        """Add a level of children; new and probable children go on."""
        if 0 in answers:
            self._repeats = {}
        growing = []
        for row, q in answers.items():
            if not tree.room:
                break
            tokens = tree.children_of(row, q, self.breadth)
            chances = {t: float(np.exp(_log_probability(q, t))) for t in tokens}
            least_chance = self.sibling_threshold * max(chances.values(), default=0.0)
            tokens = [token for token in tokens if chances[token] >= least_chance]
            for child in tree.add(row, q, tokens[: tree.room]):
                original = self._repeated(tree, child)
                if original is not None:
                    self._repeats[child] = original
                elif chances[tree.tokens[child]] >= self.threshold:
                    growing.append(child)
        return [row for row in growing if tree.depths[row] < self.depth]

    def _repeated(self, tree: Tree, row: int) -> int | None:
        """An earlier row with the same last tokens that is not an ancestor of `row`."""
        path = tree.path(row)
        ending = [tree.tokens[r] for r in path[: 1 + self.repeat]]
        for other in range(1, row):
            if other in path or other in self._repeats:
                continue
            if [tree.tokens[r] for r in tree.path(other)[: len(ending)]] == ending:
                return other
        return None

    def finish(self, tree: Tree) -> Rows:
        """All drafted rows, then the copies below repeated rows, as far as they fit."""
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(tree.parents[1:], start=1):
            children.setdefault(parent, []).append(row)
        tokens, parents = list(tree.tokens), list(tree.parents)
        originals = list(range(len(tokens)))
        # The list grows while it is read, so copies get copies of children too.
        for row, original in enumerate(originals):
            if row < len(tree.tokens) and row not in self._repeats:
                continue  # the drafter has drafted below it
            for child in children.get(self._repeats.get(original, original), []):
                if len(tokens) <= tree.budget:
                    tokens.append(tree.tokens[child])
                    parents.append(row)
                    originals.append(child)
        return Rows(tokens, parents, tree.kind)
