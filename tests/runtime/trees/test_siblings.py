"""How children are drawn, and that a draw leaves the verifier's noise alone."""

import itertools

import numpy as np
import pytest

from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from jetdraft.runtime.trees.shape import siblings

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = Distribution(np.array([0, 3, 2, 1]), np.array([0.4, 0.3, 0.2, 0.1]))
SEEDS = range(6000)


def chi_square(counts, expected):
    """How far counts are off, in standard deviations of the chi-square."""
    kept = expected > 0
    total = counts.sum()
    off = (counts[kept] - total * expected[kept]) ** 2 / (total * expected[kept])
    freedom = max(1, kept.sum() - 1)
    return (off.sum() - freedom) / np.sqrt(2 * freedom)


def drawn(kind, count):
    return [siblings(kind, Q, count, Sampling(1.0, seed=s), 9) for s in SEEDS]


def test_distinct_siblings_are_draws_without_replacement():
    pairs = list(itertools.permutations(range(4), 2))
    mass = Q.over(np.arange(4))
    expected = np.array([mass[a] * mass[b] / (1 - mass[a]) for a, b in pairs])
    draws = drawn(Kind.DISTINCT, 2)
    counts = np.array([sum(tuple(x) == pair for x in draws) for pair in pairs])
    assert abs(chi_square(counts, expected)) < 4


def test_replaced_siblings_are_independent_draws():
    pairs = list(itertools.product(range(4), repeat=2))
    mass = Q.over(np.arange(4))
    expected = np.array([mass[a] * mass[b] for a, b in pairs])
    draws = drawn(Kind.REPLACED, 2)
    counts = np.array([sum(tuple(x) == pair for x in draws) for pair in pairs])
    assert abs(chi_square(counts, expected)) < 4


def test_top_and_one_fixes_the_best_and_draws_from_the_rest():
    draws = drawn(Kind.TOP_AND_ONE, 2)
    assert {x[0] for x in draws} == {0}
    counts = np.array([sum(x[1] == token for x in draws) for token in range(4)])
    assert abs(chi_square(counts, np.array([0, 1 / 6, 2 / 6, 3 / 6]))) < 4


def test_the_first_coupled_sibling_is_what_the_drafter_would_choose():
    for seed in range(50):
        sampling = Sampling(1.0, seed=seed)
        logits = np.log(Q.probabilities)[None].astype(np.float32)
        answer = Answer(Q.ids[None], logits, np.zeros(1, np.float32), logits)
        chosen = Chooser(Sampling(1.0, seed=seed, top_k=4)).choose(answer, [9])
        assert siblings(Kind.COUPLED, Q, 3, sampling, 9)[0] == chosen[0]


def test_greedy_coupled_siblings_are_the_best():
    assert siblings(Kind.COUPLED, Q, 3, Sampling(), 9) == [0, 3, 2]


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
        tokens = siblings(kind, Q, count, chooser.sampling, 9)
        rows = Rows([7, *tokens], [-1] + [0] * count, kind, {0: Q})
        positions = [9] + [10] * count
        counts[VERIFIERS[name].choose(rows, two, positions, chooser)[0]] += 1
    assert abs(chi_square(counts, P)) < 4
