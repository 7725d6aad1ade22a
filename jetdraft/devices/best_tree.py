"""The tree of drafted rows that is most likely to be accepted."""

import heapq
from collections.abc import Sequence

Ranks = Sequence[Sequence[float]]  # By depth: of the first child, the second, ...


def best_tree(budget: int, ranks: Ranks) -> tuple[list[int], list[float]]:
    """Return the parents of the `budget` likeliest rows, and the chance of each row.

    `ranks[d]` has the chances of the first, second, ... child of a right row at d.
    Rows come likeliest first. Greedy insertion is optimal (Medusa, 2401.10774).
    """
    parents, depths, chances = list[int](), [0], [1.0]
    heap = list[tuple[float, int, int]]()

    def wait(parent: int, rank: int) -> None:
        depth = depths[parent]
        if depth < len(ranks) and rank < len(ranks[depth]):
            heapq.heappush(heap, (-chances[parent] * ranks[depth][rank], parent, rank))

    wait(0, 0)
    while heap and len(parents) < budget:
        chance, parent, rank = heapq.heappop(heap)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        chances.append(-chance)
        wait(len(parents), 0)
        wait(parent, rank + 1)
    return parents, chances[1:]
