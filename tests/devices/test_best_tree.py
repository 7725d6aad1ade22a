import pytest

from jetdraft.devices.best_tree import best_tree
from jetdraft.runtime.trees.shapes import RANK_RATES


def test_the_most_likely_tree_has_the_largest_products():
    """Compared with all rows of all paths of ranks up to a depth."""
    parents, chances = best_tree(12, [RANK_RATES] * 12)
    values = [1.0]
    ranks = {}
    for parent in parents:
        rank = ranks.get(parent, 0)
        ranks[parent] = rank + 1
        values.append(values[parent] * RANK_RATES[rank])
    every, level = [], [1.0]
    for _ in range(12):
        level = sorted((v * rate for v in level for rate in RANK_RATES), reverse=True)
        level = level[:40]
        every += level
    best = sorted(every, reverse=True)[:12]
    assert sorted(values[1:], reverse=True) == pytest.approx(best)
    assert chances == pytest.approx(values[1:])


def test_a_tree_without_siblings_is_a_chain():
    assert best_tree(3, [[0.6], [0.5], [0.4]]) == ([0, 1, 2], [0.6, 0.3, 0.12])
    assert best_tree(5, [[0.6], [0.5]]) == ([0, 1], [0.6, 0.3])
