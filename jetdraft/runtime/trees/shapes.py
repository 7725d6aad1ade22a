"""Shapes of draft trees, a tree while it grows, and its siblings.

`Rerank`, `Comb` and `Merged` drop rows by their probability. To drop rows of a sampled
draft would bias the text, so siblings must be picked by rank or be coupled, and the
walk must verify.

`Heap` and `ReachThreshold` grow where acceptance is likely (DySpec, 2410.11744). The
reach of a row is the chance, by the drafter's probabilities q, that the verifier comes
to try the row. Siblings x_1, x_2, ... are tried in turn:

    share(x_i) = q(x_i) / (1 - q(x_1) - ... - q(x_{i-1}))     of the mass that is left
    reach(x_1)          = reach of the parent, if the parent is accepted
    reach(x_{i+1})      = reach(x_i) (1 - share(x_i))
    reach(x_i's child)  = reach(x_i) share(x_i)
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jetdraft.devices.best_tree import best_tree
from jetdraft.errors import DraftingError
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.sampling.chooser import Chooser, Sampling

# How often the first, the second, ... coupled sibling is right
# (docs/log/trees-and-verifiers.md).
RANK_RATES = (0.63, 0.13, 0.06, 0.036, 0.024, 0.016, 0.013, 0.01)


@dataclass
class Tree:
    """The drafted rows, up to `budget`; the root's children are at `position`.

    `notes` are what a shape keeps of rows while it grows them.
    """

    kind: Kind
    chooser: Chooser
    position: int
    budget: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    drawn_from: dict[int, Distribution] = field(default_factory=dict)
    notes: dict[int, Any] = field(default_factory=dict)

    @property
    def room(self) -> int:
        return self.budget + 1 - len(self.tokens)

    def children_of(self, row: int, q: Distribution, count: int) -> list[int]:
        """Choose the tokens of at most `count` children of a row; adds no rows."""
        position = self.position + self.depths[row]
        # Unique in a generation, since the root's position grows with every round.
        family = (self.position << 8) + row
        sampling = self.chooser.sampling
        return draw_siblings(self.kind, q, count, sampling, position, family)

    def add(self, row: int, q: Distribution, tokens: Sequence[int]) -> list[int]:
        """Add children, chosen from `q`, below a row; returns their row numbers."""
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
        return Rows(self.tokens, self.parents, self.kind, self.drawn_from)


class Shape(ABC):
    """Decides which rows a draft tree has; siblings may be of any of the `kinds`."""

    name: ClassVar[str]
    kinds: ClassVar[frozenset[Kind]]

    @abstractmethod
    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        """Add children to the rows in `answers`: the drafter's distributions by row.

        The first call has the root's. Returns the rows that the next call needs; an
        empty list ends the draft.
        """

    def rows_to_verify(self, tree: Tree) -> Rows:
        """Return the rows to verify: all, unless a shape grows more than `budget`."""
        return tree.rows()


_SALT = 0x6A09E667F3BCC908  # Makes a draft's draws independent of the noise.


def draw_siblings(
    kind: Kind,
    q: Distribution,
    count: int,
    sampling: Sampling,
    position: int,
    family: int = 0,
) -> list[int]:
    """Return at most `count` tokens from `q`, for `position`, in the order to try.

    `q` lists its tokens best first. The k best tokens by log q + noise are k draws
    without replacement (Gumbel-top-k, Kool et al. 1903.06059), with the target's noise
    coupled siblings; in greedy decoding these are the k best of q. The draws of one
    `family` may decide whether another family grows, without a bias.
    """
    salt = sampling.seed + _SALT + (family << 8)
    if kind is Kind.REPLACED:
        return [q.draw(salt + i, position) for i in range(count)]
    if kind is Kind.TOP_AND_ONE:  # the best, then one token drawn from the others
        fixed: list[int] = q.ids[: count - 1].tolist()
        rest = Distribution(q.ids[count - 1 :], q.probabilities[count - 1 :])
        drawn = [rest.draw(salt, position)] if rest.probabilities.any() else []
        return fixed + drawn
    count = min(count, int(np.count_nonzero(q.probabilities)))
    coupled = kind is Kind.COUPLED and sampling.temperature > 0
    if kind is Kind.DISTINCT or coupled:
        seed = sampling.seed if coupled else salt
        order = np.argsort(-q.scores(seed, position), kind="stable")
        return [int(token) for token in q.ids[order[:count]]]
    return [int(token) for token in q.ids[:count]]


class Static(Shape):
    """A fixed tree of the `parents` of rows 1, 2, ...; raises `OptionError`."""

    name = "static"
    kinds = frozenset(Kind) - {Kind.TOP_AND_ONE}

    def __init__(self, parents: Sequence[int]) -> None:
        if not parents:
            raise DraftingError("the tree has no rows; give the parent of each row")
        for row, parent in enumerate(parents, start=1):
            if not 0 <= parent < row:
                fact = f"row {row} of the tree has parent {parent}"
                fix = f"parents come before their children, so give 0 to {row - 1}"
                raise DraftingError(f"{fact}; {fix}")
        self.parents = parents

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        level, row_numbers = [], tree.notes
        row_numbers.setdefault(0, 0)
        for row, q in answers.items():
            above = enumerate(self.parents[: tree.budget], 1)
            numbers = [n for n, parent in above if parent == row_numbers[row]]
            rows = tree.add(row, q, tree.children_of(row, q, len(numbers)))
            row_numbers.update(zip(rows, numbers, strict=False))
            level += rows
        return [row for row in level if row_numbers[row] in self.parents]


class Best(Static):
    """The rows most likely to be accepted if siblings are right at `RANK_RATES`."""

    name = "best"

    def __init__(self) -> None:
        super().__init__((0,))

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        if 0 in answers:
            self.parents, _ = best_tree(tree.budget, [RANK_RATES] * tree.budget)
        return super().grow(tree, answers)


class Kary(Shape):
    """A number of children for each level, for example (4, 2, 2) (MCSD, 2401.06706)."""

    name = "k-ary"
    kinds = frozenset(Kind)

    def __init__(self, branching: Sequence[int]) -> None:
        if not branching or min(branching) < 1:
            fact = f"branching {list(branching)} is not a tree"
            raise DraftingError(f"{fact}; give 1 or more per level")
        self.branching = branching

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        level = []
        for row, q in answers.items():
            # All or none, since a part of the siblings has another distribution.
            count = self.branching[tree.depths[row]]
            if count <= tree.room:
                level += tree.add(row, q, tree.children_of(row, q, count))
        deeper = [row for row in level if tree.depths[row] < len(self.branching)]
        return deeper if tree.room else []


# They may be dropped without a bias.
_RANK_KINDS = frozenset({Kind.DETERMINISTIC, Kind.COUPLED})


def _log_probability(q: Distribution, token: int) -> float:
    return float(np.log(q.probabilities[q.ids == token][0]))


class Rerank(Shape):
    """Expand the best rows of each level, then keep the best rows of all (EAGLE-2)."""

    name = "rerank"
    kinds = _RANK_KINDS
    BREADTH, DEPTH = 6, 5  # Rows that expand in a level, and levels.

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        level, scores = list[int](), tree.notes
        scores.setdefault(0, 0.0)
        for row, q in answers.items():
            for child in tree.add(row, q, tree.children_of(row, q, self.BREADTH)):
                scores[child] = scores[row] + _log_probability(q, tree.tokens[child])
                level.append(child)
        if not level or tree.depths[level[0]] >= self.DEPTH:
            return []
        level.sort(key=lambda row: -scores[row])
        return sorted(level[: self.BREADTH])

    def rows_to_verify(self, tree: Tree) -> Rows:
        # A row scores no better than its parent, so the ancestors of a row stay too.
        order = sorted(range(len(tree.tokens)), key=lambda r: (-tree.notes[r], r))
        best = sorted(order[: tree.budget + 1])
        return Rows(tree.tokens, tree.parents, tree.kind).only(best)


class Comb(Shape):
    """A chain with more siblings where the drafter is less sure (CaPE, 2402.02082)."""

    name = "comb"
    kinds = _RANK_KINDS
    # Pairs (p, n): add n siblings if the best token's probability is at most p.
    EXTRA = ((0.3, 7), (0.6, 5), (0.8, 3), (1.0, 1))
    DEPTH = 4

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        [(row, q)] = answers.items()
        best = float(q.probabilities.max())
        extra = next(count for limit, count in self.EXTRA if best <= limit + 1e-9)
        rows = tree.add(row, q, tree.children_of(row, q, min(1 + extra, tree.room)))
        is_deepest = tree.depths[rows[0]] >= self.DEPTH
        return [] if is_deepest or not tree.room else rows[:1]


class Merged(Shape):
    """Branches that end in the same tokens share what follows (GSD, 2407.16207).

    Of two branches with equal last `REPEAT` + 1 tokens the earlier is drafted further;
    in the end the later gets copies of its rows. A child needs `LEAST_SHARE` times the
    best child's probability, and continues at `LEAST`.
    """

    name = "merged"
    kinds = _RANK_KINDS
    BREADTH, DEPTH, REPEAT = 3, 5, 1
    LEAST_SHARE, LEAST = 0.1, 0.1

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        growing, repeats = [], tree.notes
        for row, q in answers.items():
            if not tree.room:
                break
            tokens = tree.children_of(row, q, self.BREADTH)
            chances = {t: float(np.exp(_log_probability(q, t))) for t in tokens}
            least_chance = self.LEAST_SHARE * max(chances.values(), default=0.0)
            tokens = [token for token in tokens if chances[token] >= least_chance]
            for child in tree.add(row, q, tokens[: tree.room]):
                original = self._find_original(tree, child)
                if original is not None:
                    repeats[child] = original
                elif chances[tree.tokens[child]] >= self.LEAST:
                    growing.append(child)
        return [row for row in growing if tree.depths[row] < self.DEPTH]

    def _find_original(self, tree: Tree, row: int) -> int | None:
        """An earlier row with the same last tokens, no ancestor of `row`, or None."""
        path = tree.path(row)
        ending = [tree.tokens[r] for r in path[: 1 + self.REPEAT]]
        for other in range(1, row):
            if other in path or other in tree.notes:
                continue
            if [tree.tokens[r] for r in tree.path(other)[: len(ending)]] == ending:
                return other
        return None

    def rows_to_verify(self, tree: Tree) -> Rows:
        # All drafted rows, then the copies below repeated rows, as far as they fit.
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(tree.parents[1:], start=1):
            children.setdefault(parent, []).append(row)
        tokens, parents = list(tree.tokens), list(tree.parents)
        originals = list(range(len(tokens)))
        # The list grows while it is read, so copies get copies of children too.
        for row, original in enumerate(originals):
            if row < len(tree.tokens) and row not in tree.notes:
                continue  # the drafter has drafted below it
            for child in children.get(tree.notes.get(original, original), []):
                if len(tokens) <= tree.budget:
                    tokens.append(tree.tokens[child])
                    parents.append(row)
                    originals.append(child)
        return Rows(tokens, parents, tree.kind)


_DISTINCT_KINDS = frozenset({Kind.DISTINCT, Kind.COUPLED, Kind.DETERMINISTIC})


def _family(tree: Tree, row: int, q: Distribution) -> list[tuple[int, float]]:
    """Choose a row's children: tokens in the order of trial, each with its share."""
    mass = dict(zip(q.ids.tolist(), q.probabilities.tolist(), strict=True))
    left, family = 1.0, []
    for token in tree.children_of(row, q, tree.budget):
        family.append((token, min(1.0, mass[token] / max(left, 1e-12))))
        left -= mass[token]
    return family


class Heap(Shape):
    """The rows with the largest reach; one drafter pass for each row with children."""

    name = "heap"
    kinds = _DISTINCT_KINDS

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # -reach, parent, rank
        self._families: dict[int, list[tuple[int, float]]] = {}

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        if 0 in answers:
            self._heap, self._families = [(-1.0, 0, 0)], {}
        for row, q in answers.items():
            self._families[row] = _family(tree, row, q)
            tree.drawn_from[row] = q
        while self._heap and tree.room:
            negative_reach, row, rank = self._heap[0]
            if row not in self._families:
                return [row]  # a child of it is next, and its tokens are unknown
            heapq.heappop(self._heap)
            for token, share in self._families[row][rank : rank + 1]:
                [child] = tree.add(row, tree.drawn_from[row], [token])
                sibling = negative_reach * (1.0 - share), row, rank + 1
                heapq.heappush(self._heap, (negative_reach * share, child, 0))
                heapq.heappush(self._heap, sibling)
        return []


class ReachThreshold(Shape):
    """All rows with a reach of at least 1 / budget; one drafter pass for each level."""

    name = "threshold"
    kinds = _DISTINCT_KINDS

    def grow(self, tree: Tree, answers: Mapping[int, Distribution]) -> list[int]:
        fresh, reaches, least = [], tree.notes, 1.0 / tree.budget
        reaches.setdefault(0, 1.0)
        for row, q in answers.items():
            reach, tokens = reaches[row], list[int]()
            for token, share in _family(tree, row, q)[: tree.room]:
                if reach < least:
                    break
                reaches[len(tree.tokens) + len(tokens)] = reach * share
                reach *= 1.0 - share
                tokens.append(token)
            fresh += tree.add(row, q, tokens)
        return [row for row in fresh if reaches[row] >= least] if tree.room else []


# The shapes that an option's value is enough for, by name.
_ALL = (Best, Heap, ReachThreshold, Rerank, Comb, Merged)
SHAPES = {shape.name: shape for shape in _ALL}
