"""Chooses which draft tree to verify, by a Monte Carlo tree search over a token table.

The search of ADED (2407.12021), which visits the child c of a node n with the largest

    puct(c) = s_c / v_c + (C1 + log((v_n + C2 + 1) / C2)) p_c sqrt(v_n) / (1 + v_c)

    v visits, s sum of scores, p_c the child's share among its siblings

One difference: the score of a rollout sums the probabilities of the tokens that it
adds, where the released code sums those of tokens that the tree already has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

C1, C2 = 32.0, 8.0
"""How much the search explores."""

Successors = Callable[[int, int], Mapping[int, float]]
"""The tokens that follow two tokens, with their weights."""


@dataclass
class Node:
    """A token of the tree, its share among siblings, its visits and sum of scores."""

    token: int
    parent: int
    share: float
    visits: int = 0
    score: float = 0.0
    children: list[int] = field(default_factory=list)
    expanded: bool = False


def puct(score: float, visits: int, parent_visits: int, share: float) -> float:
    """How much a child deserves a visit; a child without visits comes first.

    puct(3.2, 2, 10, 0.25)    # 10.26
    """
    if not visits:
        return math.inf
    explore = C1 + math.log((parent_visits + C2 + 1) / C2)
    return score / visits + explore * share * math.sqrt(parent_visits) / (1 + visits)


class TreeSearch:
    """Grows a tree below two tokens and keeps the rows with the most visits.

    TreeSearch(table.successors).run(5, 8, budget=6)    # tokens and parents
    """

    def __init__(
        self, successors: Successors, iterations: int = 48, depth: int = 4
    ) -> None:
        self.successors = successors
        self.iterations = iterations
        self.depth = depth

    def run(self, one: int, two: int, budget: int) -> tuple[list[int], list[int]]:
        """The tokens of at most `budget` rows, and their parents, where 0 is the root.

        The same two tokens always give the same tree.
        """
        self._nodes = [Node(two, -1, 1.0)]
        self._before = one
        self._random = random.Random(one << 32 | two)
        for _ in range(self.iterations):
            path = self._descend()
            score = 1.0 + self._sum_of_shares(path) + self._rollout(path)
            for index in path:
                self._nodes[index].visits += 1
                self._nodes[index].score += score
        return self._most_visited(budget)

    def _descend(self) -> list[int]:
        """The path from the root to a leaf; expands the nodes on it."""
        path = [0]
        while len(path) <= self.depth:
            node = self._nodes[path[-1]]
            if not node.expanded:
                self._expand(path)
            if not node.children:
                break
            path.append(max(node.children, key=lambda i: self._puct(i, node.visits)))
            if not self._nodes[path[-1]].visits:
                break
        return path

    def _puct(self, index: int, parent_visits: int) -> float:
        node = self._nodes[index]
        return puct(node.score, node.visits, parent_visits, node.share)

    def _expand(self, path: list[int]) -> None:
        """Add the successors of the last node of a path as its children."""
        node = self._nodes[path[-1]]
        node.expanded = True
        for token, share in self._shares(self._last_two(path)).items():
            node.children.append(len(self._nodes))
            self._nodes.append(Node(token, path[-1], share))

    def _last_two(self, path: list[int]) -> tuple[int, int]:
        before = self._nodes[path[-2]].token if len(path) > 1 else self._before
        return before, self._nodes[path[-1]].token

    def _shares(self, pair: tuple[int, int]) -> dict[int, float]:
        """The share of each successor, likeliest first."""
        weights = self.successors(*pair)
        total = sum(weights.values())
        order = sorted(weights, key=lambda token: (-weights[token], token))
        return {token: weights[token] / total for token in order}

    def _sum_of_shares(self, path: list[int]) -> float:
        return sum(self._nodes[index].share for index in path[1:])

    def _rollout(self, path: list[int]) -> float:
        """Draw tokens down to the full depth; gives the sum of their shares."""
        (one, two), score = self._last_two(path), 0.0
        for _ in range(self.depth + 1 - len(path)):
            shares = self._shares((one, two))
            if not shares:
                break
            [token] = self._random.choices(list(shares), list(shares.values()))
            score += shares[token]
            one, two = two, token
        return score

    def _most_visited(self, budget: int) -> tuple[list[int], list[int]]:
        """The tokens and parents of the nodes with the most visits."""
        # A parent has at least as many visits as its children, so it comes first.
        order = sorted(
            range(1, len(self._nodes)), key=lambda i: (-self._nodes[i].visits, i)
        )
        nodes = [i for i in order[:budget] if self._nodes[i].visits]
        rows = {0: 0} | {index: row for row, index in enumerate(nodes, start=1)}
        return (
            [self._nodes[index].token for index in nodes],
            [rows[self._nodes[index].parent] for index in nodes],
        )
