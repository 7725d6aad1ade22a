"""Shapes of draft trees over a drafter that is a table, and draws of siblings."""

import itertools
from collections import Counter

import numpy as np
import pytest

from jetdraft.devices.best_tree import best_tree
from jetdraft.errors import OptionError
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

VOCABULARY = 12
RANDOM = np.random.default_rng(5)
TABLE = RANDOM.dirichlet(np.full(VOCABULARY, 0.3), VOCABULARY)
SHAPES = [
    (Best(), Kind.COUPLED),
    (Best(), Kind.DETERMINISTIC),
    (Heap(), Kind.DISTINCT),
    (Heap(), Kind.COUPLED),
    (ReachThreshold(), Kind.DISTINCT),
    (ReachThreshold(), Kind.DETERMINISTIC),
    (Rerank(), Kind.COUPLED),
    (Comb(), Kind.DETERMINISTIC),
    (Merged(), Kind.DETERMINISTIC),
    (Merged(), Kind.COUPLED),
    (Kary((2, 2, 1)), Kind.REPLACED),
    (Kary((2, 2, 1)), Kind.TOP_AND_ONE),
    (Static((0, 0, 1, 1, 2)), Kind.DETERMINISTIC),
]


def after(token):
    """The drafter's distribution after a token, best first as a graph gives it."""
    order = np.argsort(-TABLE[token], kind="stable")
    return Distribution(order, TABLE[token][order])


def grow(shape, kind, budget=10, sampling=None):
    sampling = sampling or Sampling(1.0, seed=3)
    tree = Tree(kind, sampling, position=30, budget=budget, tokens=[4])
    answers, asked = {0: after(4)}, []
    while rows := shape.grow(tree, answers):
        assert len(set(rows)) == len(rows)
        asked += rows
        answers = {row: after(tree.tokens[row]) for row in rows}
    return tree, asked, shape.rows_to_verify(tree)


@pytest.mark.parametrize("budget", [1, 2, 5, 15])
@pytest.mark.parametrize(("shape", "kind"), SHAPES)
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
    _, _, rows = grow(Static((0, 0, 1, 1, 2)), Kind.DETERMINISTIC)
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


def test_the_heap_puts_rows_in_by_falling_reach():
    tree, _, _ = grow(Heap(), Kind.DISTINCT, budget=15)
    order = tried(tree)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(order))


def test_the_threshold_takes_what_reaches_one_in_budget():
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
    shape = Rerank()
    tree, _, rows = grow(shape, Kind.DETERMINISTIC, budget=6)

    def product(tokens):
        return float(np.prod([TABLE[a][b] for a, b in itertools.pairwise(tokens)]))

    def path(of, row):
        return [of.tokens[r] for r in [*of.ancestors[row], row]]

    kept = [product(path(rows, row)) for row in range(1, len(rows))]
    grown = [product(path(tree.rows(), r)) for r in range(1, len(tree.tokens))]
    assert sorted(kept) == pytest.approx(sorted(grown)[-6:])


def test_merged_asks_less_for_the_same_rows():
    """With merging on one token alone, repeated words are drafted once."""
    _, asked, rows = grow(Merged(repeat=0), Kind.DETERMINISTIC, budget=15)
    _, alone, _ = grow(Merged(repeat=99), Kind.DETERMINISTIC, budget=15)
    assert len(asked) < len(alone)
    for row in range(1, len(rows)):
        follows = after(rows.tokens[rows.parents[row]]).ids[:3]
        assert rows.tokens[row] in follows


@pytest.mark.parametrize(
    ("shape", "second"),
    [
        (Heap(), [0.5, 0.3, 0.2]),
        (ReachThreshold(), [0.7, 0.2, 0.1]),
        (Kary((2, 1)), None),
    ],
)
def test_a_shape_that_looks_at_draws_does_not_bias_them(shape, second):
    """Whether a row gets children may depend on what its cousins drew.

    Two levels, all of the verifier's randomness summed exactly, the draft's by seeds.
    """
    q = [np.array([0.6, 0.4, 0.0]), np.array(second or [0.5, 0.3, 0.2])]
    p = [np.array([0.5, 0.5, 0.0]), np.array([0.3, 0.4, 0.3])]
    drafters = [Distribution(np.argsort(-x), np.sort(x)[::-1]) for x in q]
    samples = []
    for seed in range(1500):
        tree = Tree(Kind.DISTINCT, Sampling(1.0, seed=seed), 30, 4, [0])
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
    expected = p[0][:2, None] * p[1]
    assert (np.abs(mean - expected) <= 4.5 * error + 1e-9).all()


def conditional(p, q, rows, row):
    children = [rows.tokens[child] for child in rows.children(row)]
    rule = VERIFIERS["recursive"].rule
    return rule(p, q, children, Kind.DISTINCT) if children else p


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


P = np.array([0.5, 0.3, 0.15, 0.05])
Q = Distribution(np.array([0, 3, 2, 1]), np.array([0.4, 0.3, 0.2, 0.1]))
SEEDS = range(2000)


def chi_square(counts, expected):
    """How far counts are off, in standard deviations of the chi-square."""
    kept = expected > 0
    total = counts.sum()
    off = (counts[kept] - total * expected[kept]) ** 2 / (total * expected[kept])
    freedom = max(1, kept.sum() - 1)
    return (off.sum() - freedom) / np.sqrt(2 * freedom)


MASS = Q.over(np.arange(4))


@pytest.mark.parametrize(
    ("kind", "chance"),
    [
        (Kind.REPLACED, lambda a, b: MASS[a] * MASS[b]),
        (Kind.DISTINCT, lambda a, b: (a != b) * MASS[a] * MASS[b] / (1 - MASS[a])),
        (Kind.TOP_AND_ONE, lambda a, b: (a == 0 != b) * MASS[b] / (1 - MASS[0])),
    ],
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
    # Greedy ones are the best.
    assert draw_siblings(Kind.COUPLED, Q, 3, Sampling(), 9) == [0, 3, 2]


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("rejection", Kind.REPLACED, 1),
        ("recursive", Kind.REPLACED, 2),
        ("recursive", Kind.DISTINCT, 2),
        ("k-seq", Kind.REPLACED, 2),
        ("greedy-plus-one", Kind.TOP_AND_ONE, 2),
        ("walk", Kind.COUPLED, 2),
    ],
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
        positions = [9] + [10] * count
        counts[VERIFIERS[name].choose(rows, two, positions, chooser)[0]] += 1
    assert abs(chi_square(counts, P)) < 4
