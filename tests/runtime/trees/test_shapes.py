import itertools
import random
from collections import Counter

import numpy as np
import pytest

from jetdraft.devices.best_tree import best_tree
from jetdraft.errors import OptionError
from jetdraft.methods.ppd.method import (
    SparsePlan,
    SparseTree,
    best_plan,
    likeliest_tree,
    make_plan,
)
from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from jetdraft.runtime.trees.shapes import (
    RANK_RATES,
    Best,
    Comb,
    Heap,
    Kary,
    Merged,
    ReachThreshold,
    Rerank,
    Static,
    Tree,
    draw_siblings,
)
from tests import cases

VOCABULARY = 12
RANDOM = np.random.default_rng(5)
TABLE = RANDOM.dirichlet(np.full(VOCABULARY, 0.3), VOCABULARY)
STATIC = Static((0, 0, 1, 1, 2))
SHAPES = {
    Kind.COUPLED: [Best(), Heap(), Rerank(), Merged()],
    Kind.DETERMINISTIC: [Best(), ReachThreshold(), Comb(), Merged(), STATIC],
    Kind.DISTINCT: [Heap(), ReachThreshold()],
    Kind.REPLACED: [Kary((2, 2, 1))],
    Kind.TOP_AND_ONE: [Kary((2, 2, 1))],
}


def after(token):
    """The drafter's distribution after a token, best first as a graph gives it."""
    order = np.argsort(-TABLE[token], kind="stable")
    return Distribution(order, TABLE[token][order])


def grow(shape, kind, budget=10, sampling=None):
    sampling = sampling or Sampling(1.0, seed=3)
    tree = Tree(kind, Chooser(sampling), position=30, budget=budget, tokens=[4])
    answers, asked = {0: after(4)}, []
    while rows := shape.grow(tree, answers):
        assert len(set(rows)) == len(rows)
        asked += rows
        answers = {row: after(tree.tokens[row]) for row in rows}
    return tree, asked, shape.rows_to_verify(tree)


@pytest.mark.parametrize("budget", [1, 2, 5, 15])
@cases("shape, kind", *((shape, kind) for kind in SHAPES for shape in SHAPES[kind]))
def test_every_shape_makes_a_tree_within_its_budget(shape, kind, budget):
    _, asked, rows = grow(shape, kind, budget)
    rows.check()
    rows.depth_first().check()
    assert rows.tokens[0] == 4
    assert rows.drafted <= budget
    assert len(asked) == len(set(asked)), "a row was asked about twice"
    for row in range(len(rows)):
        tokens = [rows.tokens[child] for child in rows.children(row)]
        assert kind is Kind.REPLACED or len(set(tokens)) == len(tokens)
    assert grow(shape, kind, budget)[2].tokens == rows.tokens, "the seed repeats it"


def test_a_static_tree_has_the_given_parents_in_order_of_levels():
    _, _, rows = grow(STATIC, Kind.DETERMINISTIC)
    assert rows.parents == [-1, 0, 0, 1, 1, 2]
    best = after(4).ids
    assert rows.tokens[1:3] == best[:2].tolist()
    assert rows.tokens[5] == after(best[1]).ids[0]


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, -1), ()])
def test_a_static_tree_with_wrong_parents_is_refused(parents):
    with pytest.raises(OptionError, match="parent"):
        Static(parents)


def test_k_ary_levels():
    _, _, rows = grow(Kary((3, 2)), Kind.DETERMINISTIC, budget=9)
    assert np.bincount(rows.depths).tolist() == [1, 3, 6]
    _, _, rows = grow(Kary((1, 1, 1)), Kind.REPLACED, budget=3)
    assert rows.is_chain


def tried(tree):
    """The reach with which each row was put in: before its own token is known."""
    accepted, tried = [1.0], []
    for row in range(1, len(tree.tokens)):
        parent = tree.parents[row]
        mass = TABLE[tree.tokens[parent]]
        # It is tried if all elders fail: each fails with the rest's share.
        reach, rest = accepted[parent], 1.0
        for elder in (r for r in range(1, row) if tree.parents[r] == parent):
            reach *= 1.0 - mass[tree.tokens[elder]] / rest
            rest -= mass[tree.tokens[elder]]
        tried.append(reach)
        accepted.append(reach * mass[tree.tokens[row]] / rest)
    return tried


def test_the_heap_and_the_threshold_take_rows_by_their_reach():
    tree, _, _ = grow(Heap(), Kind.DISTINCT, budget=15)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(tried(tree)))
    tree, _, _ = grow(ReachThreshold(), Kind.DISTINCT, budget=15)
    assert min(tried(tree)) >= 1 / 15 - 1e-9


def test_a_comb_branches_along_its_first_path_only():
    tree, asked, rows = grow(Comb(), Kind.DETERMINISTIC, budget=15)
    spine = {0, *asked}
    assert {rows.parents[row] for row in range(1, len(rows))} <= spine
    for row in sorted(spine)[:-1]:
        sure = TABLE[tree.tokens[row]].max()
        extra = next(count for limit, count in Comb.EXTRA if sure <= limit)
        assert len(rows.children(row)) in (1 + extra, rows.drafted - row)


def test_rerank_keeps_the_best_products():
    tree, _, rows = grow(Rerank(), Kind.DETERMINISTIC, budget=6)

    def product(tokens):
        return float(np.prod([TABLE[a][b] for a, b in itertools.pairwise(tokens)]))

    def path(of, row):
        return [of.tokens[r] for r in [*of.ancestors[row], row]]

    kept = [product(path(rows, row)) for row in range(1, len(rows))]
    grown = [product(path(tree.rows(), r)) for r in range(1, len(tree.tokens))]
    assert sorted(kept) == pytest.approx(sorted(grown)[-6:])


def test_merged_asks_less_for_the_same_rows():
    shape = Merged()
    shape.REPEAT = 0
    _, asked, rows = grow(shape, Kind.DETERMINISTIC, budget=15)
    shape.REPEAT = 99
    _, alone, _ = grow(shape, Kind.DETERMINISTIC, budget=15)
    assert len(asked) < len(alone)
    for row in range(1, len(rows)):
        assert rows.tokens[row] in after(rows.tokens[rows.parents[row]]).ids[:3]


@cases(
    "shape, second",
    (Heap(), [0.5, 0.3, 0.2]),
    (ReachThreshold(), [0.7, 0.2, 0.1]),
    (Kary((2, 1)), None),
)
def test_a_shape_that_looks_at_draws_does_not_bias_them(shape, second):
    q = [np.array([0.6, 0.4, 0.0]), np.array(second or [0.5, 0.3, 0.2])]
    p = [np.array([0.5, 0.5, 0.0]), np.array([0.3, 0.4, 0.3])]
    drafters = [Distribution(np.argsort(-x), np.sort(x)[::-1]) for x in q]
    samples = []
    for seed in range(1500):
        tree = Tree(Kind.DISTINCT, Chooser(Sampling(1.0, seed=seed)), 30, 4, [0])
        answers = {0: drafters[0]}
        while rows := shape.grow(tree, answers):
            answers = {row: drafters[1] for row in rows if tree.depths[row] == 1}
        joint = np.zeros((2, 3))
        rows = shape.rows_to_verify(tree)
        first = conditional(p[0], q[0], rows, 0)
        for token in (0, 1):
            below = [r for r in rows.children(0) if rows.tokens[r] == token]
            after_it = conditional(p[1], q[1], rows, below[0]) if below else p[1]
            joint[token] = first[token] * after_it
        samples.append(joint)
    mean = np.mean(samples, axis=0)
    error = np.std(samples, axis=0) / np.sqrt(len(samples))
    assert (np.abs(mean - p[0][:2, None] * p[1]) <= 4.5 * error + 1e-9).all()


def conditional(p, q, rows, row):
    children = [rows.tokens[child] for child in rows.children(row)]
    return VERIFIERS["recursive"].rule(p, q, children, Kind.DISTINCT) if children else p


def test_the_most_likely_tree_has_the_largest_products():
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


P = np.array([0.5, 0.3, 0.15, 0.05])
Q = Distribution(np.array([0, 3, 2, 1]), np.array([0.4, 0.3, 0.2, 0.1]))
SEEDS = range(2000)


def chi_square(counts, expected):
    kept = expected > 0
    total = counts.sum()
    off = (counts[kept] - total * expected[kept]) ** 2 / (total * expected[kept])
    freedom = max(1, kept.sum() - 1)
    return (off.sum() - freedom) / np.sqrt(2 * freedom)


MASS = Q.over(np.arange(4))


@cases(
    "kind, chance",
    (Kind.REPLACED, lambda a, b: MASS[a] * MASS[b]),
    (Kind.DISTINCT, lambda a, b: (a != b) * MASS[a] * MASS[b] / (1 - MASS[a])),
    (Kind.TOP_AND_ONE, lambda a, b: (a == 0 != b) * MASS[b] / (1 - MASS[0])),
)
def test_siblings_are_drawn_as_their_kind_says(kind, chance):
    draws = [draw_siblings(kind, Q, 2, Sampling(1.0, seed=s), 9) for s in SEEDS]
    counts = Counter(map(tuple, draws))
    pairs = list(itertools.product(range(4), repeat=2))
    expected = np.array([chance(*pair) for pair in pairs])
    seen = np.array([counts[pair] for pair in pairs])
    assert seen[expected == 0].sum() == 0
    assert abs(chi_square(seen, expected)) < 4


def test_the_first_coupled_sibling_is_what_the_drafter_would_choose():
    for seed in range(50):
        sampling = Sampling(1.0, seed=seed)
        logits = np.log(Q.probabilities)[None].astype(np.float32)
        answer = Answer(Q.ids[None], logits, np.zeros(1, np.float32), logits)
        chosen = Chooser(Sampling(1.0, seed=seed, top_k=4)).choose(answer, [9])
        assert draw_siblings(Kind.COUPLED, Q, 3, sampling, 9)[0] == chosen[0]
    assert draw_siblings(Kind.COUPLED, Q, 3, Sampling(), 9) == [0, 3, 2]


@cases(
    "name, kind, count",
    ("rejection", Kind.REPLACED, 1),
    ("recursive", Kind.REPLACED, 2),
    ("recursive", Kind.DISTINCT, 2),
    ("k-seq", Kind.REPLACED, 2),
    ("greedy-plus-one", Kind.TOP_AND_ONE, 2),
    ("walk", Kind.COUPLED, 2),
)
def test_drafting_and_verifying_with_one_seed_draws_from_p(name, kind, count):
    """The rules are enumerated elsewhere; here the noise of both must not mix."""
    logits = np.log(P)[None].astype(np.float32)
    row = (np.arange(4)[None], logits, np.zeros(1, np.float32), logits)
    two = Answer(*(np.repeat(part, 1 + count, axis=0) for part in row))
    counts = np.zeros(4)
    for seed in SEEDS:
        chooser = Chooser(Sampling(1.0, seed=seed, top_k=4))
        tokens = draw_siblings(kind, Q, count, chooser.sampling, 9)
        rows = Rows([7, *tokens], [-1] + [0] * count, kind, {0: Q})
        counts[VERIFIERS[name].choose(rows, two, [9] + [10] * count, chooser)[0]] += 1
    assert abs(chi_square(counts, P)) < 4


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
    assert best_plan(RANKS, 7, lambda rows, probes: 10.0).trees[3].size == (8, 24)
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
