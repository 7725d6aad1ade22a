"""Sparse trees whose rows carry numbers of probes of their own (2405.18628, section 4).

A row that carries d probes and is accepted last leaves d guesses to the next draft. So
d is the state of a Markov chain over the rounds, and each state has a tree of its own:

    f_d       the expected tokens of a round in state d: the sum of its rows' chances
    p_c       the chance that row c is accepted last: its chance less its children's
    removal   the probe whose loss p_c (f_d - f_{d-1}) is least goes, until all fit
    tau       the mean of f_d over the steady state of the chain
    choose    the sizes with the largest tau / mean of the pass times
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Ranks = Sequence[Sequence[float]]
"""For each depth, how often the best, the second, ... guess is right."""

PassMs = Callable[[int, int], float]
"""The milliseconds of a pass, from its rows and its probes."""

_Sizes = tuple[tuple[int, ...], int]
"""The drafted rows of each state, and the slots of a pass."""

_IMPROVED = 4
"""Plans whose states are improved one by one."""

_SHARES = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)
"""Probes per row that are tried, beside the most that a row can carry."""


@dataclass(frozen=True)
class SparseTree:
    """The rows of a draft, depth first, and how many probes each of them carries.

    `parents` are those of rows 1, 2, ...; `chances` and `counts` begin with the root.
    """

    parents: tuple[int, ...]
    chances: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def tokens(self) -> float:
        """The expected tokens of a round, the new token included."""
        return sum(self.chances)

    @property
    def size(self) -> tuple[int, int]:
        """Its rows, the root included, and its probes."""
        return len(self.counts), sum(self.counts)

    @cached_property
    def ends(self) -> list[float]:
        """The chance of each row to be accepted last."""
        ends = list(self.chances)
        for parent, chance in zip(self.parents, self.chances[1:], strict=True):
            ends[parent] -= chance
        return ends

    def carrying(self, worth: Sequence[float], probes: int) -> SparseTree:
        """The same rows with `probes` probes at most, removed with the least loss.

        `worth[d]` are the expected tokens of a round in state d.
        """
        counts = [len(worth) - 1] * len(self.chances)
        losses = [(self._loss(worth, row, counts), row) for row in range(len(counts))]
        heapq.heapify(losses)
        for _ in range(sum(counts) - probes):
            _, row = heapq.heappop(losses)
            counts[row] -= 1
            if counts[row]:
                heapq.heappush(losses, (self._loss(worth, row, counts), row))
        return SparseTree(self.parents, self.chances, tuple(counts))

    def _loss(self, worth: Sequence[float], row: int, counts: list[int]) -> float:
        return self.ends[row] * (worth[counts[row]] - worth[counts[row] - 1])


@dataclass(frozen=True)
class SparsePlan:
    """A tree for each number of probes that the last accepted row carried.

    best_plan(ranks, 15, lambda rows, probes: 10.0).trees[3].parents
    """

    trees: tuple[SparseTree, ...]

    @cached_property
    def shares(self) -> list[float]:
        """How often each state comes up: the steady state of the chain."""
        chain = np.zeros((len(self.trees), len(self.trees)))
        for state, tree in enumerate(self.trees):
            for end, count in zip(tree.ends, tree.counts, strict=True):
                chain[state, count] += end
        # One of the balance equations follows from the others.
        system = (chain - np.eye(len(chain))).T
        system[-1] = 1.0
        shares, *_ = np.linalg.lstsq(system, np.eye(len(chain))[-1], rcond=None)
        return shares.tolist()  # type: ignore[no-any-return]

    @property
    def tokens(self) -> float:
        """tau: the expected tokens of a round."""
        pairs = zip(self.shares, self.trees, strict=True)
        return sum(share * tree.tokens for share, tree in pairs)

    def value(self, pass_ms: PassMs) -> float:
        """The expected tokens of a millisecond."""
        pairs = zip(self.shares, self.trees, strict=True)
        return self.tokens / sum(share * pass_ms(*t.size) for share, t in pairs)


def likeliest(ranks: Ranks, rows: int) -> SparseTree:
    """The `rows` likeliest rows below a root, as deep as there are ranks.

    Greedy insertion is optimal where a row's chance is the product along its path.
    """
    found: list[tuple[int, float]] = []  # parent and chance
    depths, chances = [0], [1.0]
    waiting: list[tuple[float, int, int]] = []

    def wait(parent: int, rank: int) -> None:
        if depths[parent] < len(ranks) and rank < len(ranks[depths[parent]]):
            chance = chances[parent] * ranks[depths[parent]][rank]
            heapq.heappush(waiting, (-chance, parent, rank))

    wait(0, 0)
    while waiting and len(found) < rows:
        chance, parent, rank = heapq.heappop(waiting)
        found.append((parent, -chance))
        depths.append(depths[parent] + 1)
        chances.append(-chance)
        wait(len(found), 0)
        wait(parent, rank + 1)
    return _depth_first(found)


def _depth_first(found: Sequence[tuple[int, float]]) -> SparseTree:
    """The tree of rows 1, 2, ... with each row's first child right after it."""
    children: dict[int, list[int]] = {}
    for row, (parent, _) in enumerate(found, 1):
        children.setdefault(parent, []).append(row)
    place, parents, chances = {0: 0}, list[int](), [1.0]
    waiting = [*reversed(children.get(0, []))]
    while waiting:
        row = waiting.pop()
        parent, chance = found[row - 1]
        place[row] = len(place)
        parents.append(place[parent])
        chances.append(chance)
        waiting += reversed(children.get(row, []))
    return SparseTree(tuple(parents), tuple(chances), (0,) * len(chances))


def plan_of(ranks: Ranks, rows: Sequence[int], slots: int) -> SparsePlan:
    """The plan whose tree of state d drafts `rows[d - 1]` rows, in `slots` slots each.

    Rows and probes take a slot each; probes fill what the rows leave.
    """
    states = range(len(ranks) + 1)
    bare = [likeliest(ranks[:d], rows[d - 1] if d else 0) for d in states]
    worth = [tree.tokens for tree in bare]
    left = (max(0, slots - tree.size[0]) for tree in bare)
    return SparsePlan(
        tuple(t.carrying(worth, n) for t, n in zip(bare, left, strict=True))
    )


def best_plan(
    ranks: Ranks, most: int, pass_ms: PassMs, rows: int = 0, slots: int = 0
) -> SparsePlan:
    """The plan of at most `most` drafted rows that promises most tokens per ms.

    First all states draft as many rows. Then each state's number is improved alone, in
    the best of these plans. A number of `rows` fixes that of all states, a number of
    `slots` those of a pass.
    """
    gamma = len(ranks)

    def value(sizes: _Sizes) -> float:
        return plan_of(ranks, *sizes).value(pass_ms)

    starts: list[_Sizes] = [
        ((count,) * gamma, size)
        for count in ([min(rows, most)] if rows else range(1, most + 1))
        for size in ([slots] if slots else _slots(count, gamma))
    ]
    if rows:
        return plan_of(ranks, *max(starts, key=value))
    best = heapq.nlargest(_IMPROVED, starts, key=value)
    improved = [_improved(sizes, most, value) for sizes in best]
    return plan_of(ranks, *max(improved, key=value))


def _slots(rows: int, gamma: int) -> list[int]:
    """Slots of passes with that many drafted rows, which are worth trying."""
    return [1 + rows + round(share * (1 + rows)) for share in (*_SHARES, gamma)]


def _improved(sizes: _Sizes, most: int, value: Callable[[_Sizes], float]) -> _Sizes:
    """The sizes with the best number of rows for each state in turn."""
    best, slots = sizes
    for state in range(len(best)):
        choices = [
            ((*best[:state], count, *best[state + 1 :]), slots)
            for count in range(1, min(most, slots - 1) + 1)
        ]
        best, _ = max(choices, key=value)
    return best, slots
