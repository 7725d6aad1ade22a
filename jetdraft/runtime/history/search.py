"""Which tree of tokens is worth verifying: a Monte Carlo tree search over a table.

As in ADED (2407.12021), with the rollout's score corrected: it sums the probabilities
of the tokens that the rollout adds, where the released code sums those of tokens that
were known already.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

C1, C2 = 32.0, 8.0
"""How much the search explores."""

Successors = Callable[[int, int], Mapping[int, float]]


@dataclass
class Node:
    """A token of the tree: its share among siblings, visits and sum of scores."""

    token: int
    parent: int
    share: float
    visits: int = 0
    score: float = 0.0
    children: list[int] = field(default_factory=list)
    expanded: bool = False


def puct(score: float, visits: int, parent_visits: int, share: float) -> float:
    """What makes a child worth a visit: its mean score, and how little is known.

    puct(3.2, 2, 10, 0.25)    # 10.26
    """
    if not visits:
        return math.inf
    explore = C1 + math.log((parent_visits + C2 + 1) / C2)
    return score / visits + explore * share * math.sqrt(parent_visits) / (1 + visits)


class TreeSearch:
    """Grows a tree below two tokens and keeps the rows that were visited most.

    TreeSearch(table.successors).run(5, 8, budget=6)    # tokens and parents
    """

    def __init__(
        self, successors: Successors, iterations: int = 48, depth: int = 4
    ) -> None:
        self.successors = successors
        self.iterations = iterations
        self.depth = depth

    def run(self, one: int, two: int, budget: int) -> tuple[list[int], list[int]]:
        """Tokens of at most `budget` rows and their parents, 0 being the root.

        Deterministic: rollouts draw from numbers that depend on the pair alone.
        """
        self._nodes = [Node(two, -1, 1.0)]
        self._before = one
        self._random = random.Random(one << 32 | two)
        for _ in range(self.iterations):
            path = self._descend()
            score = 1.0 + self._shares(path) + self._rollout(path)
            for index in path:
                self._nodes[index].visits += 1
                self._nodes[index].score += score
        return self._most_visited(budget)

    def _descend(self) -> list[int]:
        """From the root to a leaf, which gets its children."""
        path = [0]
        while len(path) <= self.depth:
            here = self._nodes[path[-1]]
            if not here.expanded:
                self._expand(path)
            if not here.children:
                break
            path.append(max(here.children, key=lambda i: self._worth(i, here.visits)))
            if not self._nodes[path[-1]].visits:
                break
        return path

    def _worth(self, index: int, parent_visits: int) -> float:
        node = self._nodes[index]
        return puct(node.score, node.visits, parent_visits, node.share)

    def _expand(self, path: list[int]) -> None:
        here = self._nodes[path[-1]]
        here.expanded = True
        for token, share in self._following(self._pair(path)).items():
            here.children.append(len(self._nodes))
            self._nodes.append(Node(token, path[-1], share))

    def _pair(self, path: list[int]) -> tuple[int, int]:
        before = self._nodes[path[-2]].token if len(path) > 1 else self._before
        return before, self._nodes[path[-1]].token

    def _following(self, pair: tuple[int, int]) -> dict[int, float]:
        """Successors, the likeliest first, and their shares."""
        found = self.successors(*pair)
        total = sum(found.values())
        order = sorted(found, key=lambda token: (-found[token], token))
        return {token: found[token] / total for token in order}

    def _shares(self, path: list[int]) -> float:
        return sum(self._nodes[index].share for index in path[1:])

    def _rollout(self, path: list[int]) -> float:
        """Go on by chance to the full depth; the summed shares of what was added."""
        (one, two), score = self._pair(path), 0.0
        for _ in range(self.depth + 1 - len(path)):
            found = self._following((one, two))
            if not found:
                break
            [token] = self._random.choices(list(found), list(found.values()))
            score += found[token]
            one, two = two, token
        return score

    def _most_visited(self, budget: int) -> tuple[list[int], list[int]]:
        """A parent has at least the visits of its children, so it comes first."""
        order = sorted(
            range(1, len(self._nodes)), key=lambda i: (-self._nodes[i].visits, i)
        )
        kept = [i for i in order[:budget] if self._nodes[i].visits]
        row = {0: 0} | {index: row for row, index in enumerate(kept, start=1)}
        return (
            [self._nodes[index].token for index in kept],
            [row[self._nodes[index].parent] for index in kept],
        )
