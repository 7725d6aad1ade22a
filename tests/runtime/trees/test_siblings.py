"""How children are drawn, and that a draw leaves the verifier's noise alone."""

import itertools
from collections import Counter

import numpy as np
import pytest

from jetdraft.runtime.drafts.noise import Distribution
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from jetdraft.runtime.trees.shapes import draw_siblings

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
