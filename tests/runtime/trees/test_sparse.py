"""Sparse trees: their sizes, and the Markov chain over their states."""

import itertools
import random

import pytest

from jetdraft.methods.ppd.sparse_trees import (
    SparsePlan,
    SparseTree,
    best_plan,
    likeliest_tree,
    make_plan,
)

RANKS = [[0.5, 0.15, 0.1, 0.02], [0.4, 0.1, 0.05, 0.02], [0.3, 0.1, 0.05, 0.02]]


def test_the_likeliest_rows_come_depth_first():
    tree = likeliest_tree(RANKS, 4)
    assert tree.parents == (0, 1, 0, 0)
    assert tree.chances == pytest.approx([1.0, 0.5, 0.2, 0.15, 0.1])
    assert tree.tokens == pytest.approx(1.95)
    assert tree.last_chances == pytest.approx([0.25, 0.3, 0.2, 0.15, 0.1])
    assert likeliest_tree(RANKS[:1], 9).parents == (0, 0, 0, 0)


@pytest.mark.parametrize("slots", [6, 13, 20])
def test_rows_and_probes_fill_the_slots(slots):
    plan = make_plan(RANKS, (4, 5, 5), slots)
    assert [tree.size[0] for tree in plan.trees] == [1, 5, 6, 6]
    assert plan.trees[0].counts == (3,)
    for tree in plan.trees[1:]:
        assert sum(tree.size) == slots
        assert all(0 <= count <= 3 for count in tree.counts)


def test_the_probe_that_is_missed_least_goes_first():
    """Against every choice of one probe to remove, and of two."""
    tree, worth = likeliest_tree(RANKS, 3), [1.0, 1.7, 2.1, 2.3]

    def kept(counts):
        return sum(e * worth[c] for e, c in zip(tree.last_chances, counts, strict=True))

    for removed in (1, 2, 3):
        got = tree.with_probes(worth, 12 - removed)
        best = max(kept(counts) for counts in _counts(4, 12 - removed))
        assert kept(got.counts) == pytest.approx(best)


def _counts(rows, total):
    if rows == 1:
        return [(total,)] if 0 <= total <= 3 else []
    return [(n, *rest) for n in range(4) for rest in _counts(rows - 1, total - n)]


def test_the_expected_tokens_are_those_of_a_simulation():
    plan = make_plan(RANKS, (2, 4, 5), 14)
    assert sum(plan.steady_state) == pytest.approx(1.0)
    draw, state, tokens, seen = random.Random(3), 3, 0, [0] * 4
    for _ in range(60_000):
        tree = plan.trees[state]
        seen[state] += 1
        [row] = draw.choices(range(len(tree.last_chances)), tree.last_chances)
        tokens += 1 + _depth(tree.parents, row)
        state = tree.counts[row]
    assert tokens / 60_000 == pytest.approx(plan.tokens, abs=0.02)
    assert [n / 60_000 for n in seen] == pytest.approx(plan.steady_state, abs=0.02)


def _depth(parents, row):
    return 0 if row == 0 else 1 + _depth(parents, parents[row - 1])


def test_free_rows_are_taken_and_dear_ones_are_not():
    free = best_plan(RANKS, 7, lambda rows, probes: 10.0)
    assert free.trees[3].size == (8, 24)
    dear = best_plan(RANKS, 7, lambda rows, probes: 1.0 + rows + probes)
    assert sum(dear.trees[1].size) < 6
    assert dear.tokens_per_ms(lambda rows, probes: 1.0 + rows + probes) >= max(
        make_plan(RANKS, (n, n, n), slots).tokens_per_ms(
            lambda rows, probes: 1.0 + rows + probes
        )
        for n in (1, 2, 3)
        for slots in (n + 1, 2 * n + 2)
    )


def test_with_one_guess_for_each_place_the_tree_is_a_chain():
    plan = best_plan([ranks[:1] for ranks in RANKS], 7, lambda rows, probes: 10.0)
    assert plan.trees[3].parents == (0, 1, 2)


# A pass of a target of 13 M parameters on two cores, with dear and with cheap probes.
COSTS = {
    "dear": lambda rows, probes: 0.36 + 0.11 * max(rows, 2) + 0.105 * probes,
    "cheap": lambda rows, probes: 0.36 + 0.11 * max(rows, 2) + 0.01 * probes,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("best", [0.2, 0.6])
def test_no_other_plan_promises_more(cost, best):
    """Against every number of rows of each state, and of probes of each row."""
    ranks, pass_ms = [[best, 0.12], [best, 0.1]], COSTS[cost]

    def carriers(state):
        for rows in range(1, 3) if state else [0]:
            tree = likeliest_tree(ranks[:state], rows)
            for counts in itertools.product(range(3), repeat=rows + 1):
                if state or counts[0]:
                    yield SparseTree(tree.parents, tree.chances, counts)

    plans = itertools.product(*(list(carriers(state)) for state in range(3)))
    wanted = max(SparsePlan(trees).tokens_per_ms(pass_ms) for trees in plans)
    assert best_plan(ranks, 2, pass_ms).tokens_per_ms(pass_ms) == pytest.approx(wanted)


def test_states_have_sizes_of_their_own():
    """Guesses that are mostly right are drafted round after round, not every other."""
    plan = best_plan([[0.6, 0.1], [0.6, 0.1]], 7, COSTS["dear"])
    assert plan.tokens > 1.4
    assert plan.trees[1].counts[1]
