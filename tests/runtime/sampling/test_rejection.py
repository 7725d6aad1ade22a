"""Exactness by enumeration: summed over all drafts, the chosen token follows p."""

import numpy as np
import pytest

from jetdraft.runtime.drafts.rows import Kind
from jetdraft.runtime.sampling.verifiers import VERIFIERS

from .drafts import enumerate_drafts, optimum, outcome

P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([0.4, 0.1, 0.2, 0.3])
EXACT = [
    ("rejection", Kind.REPLACED, 1),
    ("rejection", Kind.DISTINCT, 1),
    *[("recursive", Kind.REPLACED, k) for k in (1, 2, 3)],
    *[("recursive", Kind.DISTINCT, k) for k in (1, 2, 3)],
    *[("k-seq", Kind.REPLACED, k) for k in (1, 2, 3)],
    *[("greedy-plus-one", Kind.TOP_AND_ONE, k) for k in (1, 2, 3)],
]


def pairs(count=25):
    """p and q over 3 to 5 tokens: spread, peaked, equal, disjoint."""
    random = np.random.default_rng(3)
    for _ in range(count):
        size = int(random.integers(3, 6))
        for sharpness in (0.2, 1.0, 5.0):
            p, q = random.dirichlet(np.full(size, sharpness), 2)
            yield p, q
    yield P, Q
    yield P, P
    yield np.array([0.5, 0.5, 0, 0, 0]), np.array([0, 0, 0.3, 0.3, 0.4])
    yield np.array([0, 0, 1.0, 0]), Q
    yield P, np.array([0.9, 0.1, 0, 0])


@pytest.mark.parametrize(("name", "kind", "k"), EXACT)
def test_the_chosen_token_follows_p(name, kind, k):
    rule = VERIFIERS[name].rule
    for p, q in pairs():
        if np.count_nonzero(q) < k and kind is not Kind.REPLACED:
            continue
        total, _ = outcome(rule, p, q, k, kind)
        np.testing.assert_allclose(total, p, atol=1e-9)


@pytest.mark.parametrize(("name", "kind", "k"), EXACT)
def test_acceptance_stays_below_the_optimum(name, kind, k):
    rule = VERIFIERS[name].rule
    for p, q in pairs(5):
        if np.count_nonzero(q) < k and kind is not Kind.REPLACED:
            continue
        _, accepted = outcome(rule, p, q, k, kind)
        assert accepted <= optimum(p, q, k, kind) + 1e-9


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("recursive", Kind.REPLACED, (0.7, 0.83, 0.847)),
        ("recursive", Kind.DISTINCT, (0.7, 0.8419642857, 0.881925)),
        ("k-seq", Kind.REPLACED, (0.7, 0.84, 0.875)),
        ("greedy-plus-one", Kind.TOP_AND_ONE, (0.7, 0.8666666667, 1.0)),
    ],
)
def test_golden_acceptance(name, kind, expected):
    for k, value in enumerate(expected, start=1):
        _, accepted = outcome(VERIFIERS[name].rule, P, Q, k, kind)
        assert accepted == pytest.approx(value, abs=1e-6)


def test_golden_optimum():
    expected = {
        Kind.REPLACED: (0.7, 0.89, 0.971),
        Kind.DISTINCT: (0.7, 0.9345238, 1.0),
        Kind.TOP_AND_ONE: (0.7, 0.8666667, 1.0),
    }
    for kind, values in expected.items():
        for k, value in enumerate(values, start=1):
            assert optimum(P, Q, k, kind) == pytest.approx(value, abs=1e-6)


def test_greedy_plus_one_attains_its_optimum():
    for p, q in pairs(10):
        for k in (1, 2, 3):
            if np.count_nonzero(q) < k:
                continue
            rule = VERIFIERS["greedy-plus-one"].rule
            _, accepted = outcome(rule, p, q, k, Kind.TOP_AND_ONE)
            best = optimum(p, q, k, Kind.TOP_AND_ONE)
            assert accepted == pytest.approx(best, abs=1e-9)


def test_one_draft_is_speculative_sampling():
    """A.2's vector: residual [1/3, 2/3, 0, 0] after a rejected draft."""
    pi = VERIFIERS["rejection"].rule(P, Q, [3], Kind.REPLACED)
    accepted = P[3] / Q[3]
    expected = (1 - accepted) * np.array([1 / 3, 2 / 3, 0, 0])
    expected[3] += accepted
    np.testing.assert_allclose(pi, expected)


@pytest.mark.parametrize(("name", "kind", "k"), EXACT)
def test_a_drafter_that_is_the_target_is_always_right_at_first(name, kind, k):
    for children, _ in enumerate_drafts(P, k, kind):
        pi = VERIFIERS[name].rule(P, P, children, kind)
        assert pi.sum() == pytest.approx(1.0)
        if kind is not Kind.TOP_AND_ONE and name != "k-seq":
            assert pi[children[0]] == pytest.approx(1.0)


def test_mixing_kinds_is_biased():
    """Why kinds exist: the two best tokens taken for drawn ones (MCSD at T = 0)."""
    q = np.array([0.6, 0.4, 0, 0])
    pi = VERIFIERS["recursive"].rule(P, q, [0, 1], Kind.DISTINCT)
    assert np.abs(pi - P).max() > 0.3
