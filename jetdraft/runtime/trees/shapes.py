"""Shapes of draft trees.

`Static`, `Best` and `Kary` do not depend on what the drafter says. The others follow
how sure the drafter is of each token. `Rerank`, `Comb` and `Merged` drop rows by their
probability. To drop rows of a sampled draft would bias the text, so siblings must be
picked by rank or be coupled, and the walk must verify.

`Heap` and `ReachThreshold` grow where acceptance is likely (DySpec, 2410.11744). The
reach of a row is the chance, by the drafter's probabilities q, that the verifier comes
to try the row. Siblings x_1, x_2, ... are tried in turn:

    share(x_i) = q(x_i) / (1 - q(x_1) - ... - q(x_{i-1}))     of the mass that is left
    reach(x_1)          = reach of the parent, if the parent is accepted
    reach(x_{i+1})      = reach(x_i) (1 - share(x_i))
    reach(x_i's child)  = reach(x_i) share(x_i)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jetdraft.devices.best_tree import best_tree
from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.trees.shape import Shape, Tree

RANK_RATES = (0.63, 0.13, 0.06, 0.036, 0.024, 0.016, 0.013, 0.01)
"""How often the first, the second, ... coupled sibling is right
(docs/log/trees-and-verifiers.md)."""


class Static(Shape):
    """A fixed list of rows: `parents` has the parents of rows 1, 2, ...; 0 is the root.

    Siblings are picked in the order of the list, the best sibling first. Raises
    `OptionError` if a parent does not come before its row.
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


_RANKED = frozenset({Kind.DETERMINISTIC, Kind.COUPLED})


def _log_probability(q: Distribution, token: int) -> float:
    """The log probability of a token that `q` lists."""
    return float(np.log(q.probabilities[q.ids == token][0]))


class Rerank(Shape):
    """Expand the best rows of each level, then keep the best rows of all (EAGLE-2)."""

    name = "rerank"
    kinds = _RANKED

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
    kinds = _RANKED
    EXTRA = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
    """Pairs of a probability and a number of further siblings.

    The first pair counts whose probability is not below the probability of the
    drafter's best token.
    """

    def __init__(self, depth: int = 4) -> None:
        self.depth = depth

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the children of the chain's last row; the first child continues."""
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

    A child is added if its probability is at least `sibling_threshold` times the
    best child's, and continues if its probability is at least `threshold`.
    """

    name = "merged"
    kinds = _RANKED

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


_UNEQUAL = frozenset({Kind.DISTINCT, Kind.COUPLED, Kind.DETERMINISTIC})


@dataclass
class _Family:
    """Siblings in the order they are tried, and the share of each of the mass left."""

    tokens: list[int]
    shares: list[float]

    @classmethod
    def of(cls, tree: Tree, row: int, q: Distribution) -> _Family:
        tokens = tree.children_of(row, q, tree.budget)
        mass = dict(zip(q.ids.tolist(), q.probabilities.tolist(), strict=True))
        left, shares = 1.0, []
        for token in tokens:
            shares.append(min(1.0, mass[token] / max(left, 1e-12)))
            left -= mass[token]
        return cls(tokens, shares)


class Heap(Shape):
    """The rows with the largest reach; one drafter pass for each row with children."""

    name = "heap"
    kinds = _UNEQUAL

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # -reach, parent, rank
        self._families: dict[int, _Family] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the rows with the largest reach until the drafter must be asked."""
        if 0 in answers:
            self._heap, self._families = [(-1.0, 0, 0)], {}
        for row, q in answers.items():
            self._families[row] = _Family.of(tree, row, q)
            tree.drawn_from[row] = q
        while self._heap and tree.room:
            negative_reach, row, rank = self._heap[0]
            if row not in self._families:
                return [row]  # a child of it is next, and its tokens are unknown
            heapq.heappop(self._heap)
            self._add_sibling(tree, -negative_reach, row, rank)
        return []

    def _add_sibling(self, tree: Tree, reach: float, row: int, rank: int) -> None:
        """Add one child of a row; its child and its next sibling enter the heap."""
        family = self._families[row]
        if rank >= len(family.tokens):
            return
        share = family.shares[rank]
        q = tree.drawn_from[row]
        [child] = tree.add(row, q, [family.tokens[rank]])
        heapq.heappush(self._heap, (-reach * share, child, 0))
        heapq.heappush(self._heap, (-reach * (1.0 - share), row, rank + 1))


class ReachThreshold(Shape):
    """All rows with a reach of at least 1 / budget; one drafter pass for each level."""

    name = "threshold"
    kinds = _UNEQUAL

    def __init__(self) -> None:
        self._reach: dict[int, float] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add the children of a level while their reach is large enough."""
        if 0 in answers:
            self._reach = {0: 1.0}
        least = 1.0 / tree.budget
        fresh = []
        for row, q in answers.items():
            family = _Family.of(tree, row, q)
            reach, count = self._reach[row], 0
            for share in family.shares:
                if reach < least or count == tree.room:
                    break
                self._reach[len(tree.tokens) + count] = reach * share
                reach *= 1.0 - share
                count += 1
            fresh += tree.add(row, q, family.tokens[:count])
        return [row for row in fresh if self._reach[row] >= least] if tree.room else []
