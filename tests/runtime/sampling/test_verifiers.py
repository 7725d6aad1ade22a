"""Exactness by enumeration: summed over all drafts, the chosen token follows p."""

import itertools

import numpy as np
import pytest

from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS

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


def pairs(count=10):
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
    """And acceptance stays below its optimum, which greedy-plus-one attains."""
    for p, q in pairs():
        if np.count_nonzero(q) < k and kind is not Kind.REPLACED:
            continue
        total, accepted = outcome(VERIFIERS[name].rule, p, q, k, kind)
        np.testing.assert_allclose(total, p, atol=1e-9)
        best = optimum(p, q, k, kind)
        assert accepted <= best + 1e-9
        if name == "greedy-plus-one":
            assert accepted == pytest.approx(best, abs=1e-9)


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
    for kind, values in {
        Kind.REPLACED: (0.7, 0.89, 0.971),
        Kind.DISTINCT: (0.7, 0.9345238, 1.0),
        Kind.TOP_AND_ONE: (0.7, 0.8666667, 1.0),
    }.items():
        for k, value in enumerate(values, start=1):
            assert optimum(P, Q, k, kind) == pytest.approx(value, abs=1e-6)


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


def enumerate_drafts(q, k, kind):
    """Pairs of children and the probability that they are drawn, in that order."""
    tokens = np.flatnonzero(q).tolist()
    if kind is Kind.REPLACED:
        for children in itertools.product(tokens, repeat=k):
            yield children, float(np.prod(q[list(children)]))
    elif kind is Kind.DISTINCT:
        for children in itertools.permutations(tokens, k):
            left, probability = 1.0, 1.0
            for x in children:
                probability *= q[x] / left
                left -= q[x]
            yield children, probability
    else:
        fixed = np.argsort(-q, kind="stable")[: k - 1].tolist()
        rest = 1.0 - q[fixed].sum()
        for x in set(tokens) - set(fixed):
            yield (*fixed, x), q[x] / rest


def optimum(p, q, k, kind):
    """1 + min over token sets H of p(H) - P(all drafted tokens are in H)."""
    drafts = list(enumerate_drafts(q, k, kind))
    best = 0.0
    for bits in itertools.product((False, True), repeat=len(p)):
        inside = {x for x, bit in enumerate(bits) if bit}
        drafted = sum(weight for x, weight in drafts if set(x) <= inside)
        best = min(best, p[list(inside)].sum() - drafted)
    return 1.0 + best


def outcome(rule, p, q, k, kind):
    total, accepted = np.zeros(len(p)), 0.0
    for children, weight in enumerate_drafts(q, k, kind):
        pi = rule(p, q, children, kind)
        assert pi.min() >= -1e-12
        total += weight * pi
        accepted += weight * pi[list(set(children))].sum()
    return total, accepted


def tolerant(**settings):
    return VERIFIERS["tolerant"].with_settings(settings)


def accepted(name, children):
    return VERIFIERS[name].rule(P, P, children, Kind.DETERMINISTIC)


def test_typical_acceptance_takes_what_passes_its_threshold():
    """H = 1.1421 nats, threshold min(0.09, 0.3 exp(-H)) = 0.09: tokens 0, 1, 2."""
    for token in (0, 1, 2):
        assert accepted("typical", [token])[token] == 1.0
    np.testing.assert_array_equal(accepted("typical", [3]), P)
    assert accepted("typical", [2, 1, 3])[1] == 1.0


def answer_of(rows):
    """Rows whose candidates have the probabilities P, in an order of their own."""
    generator = np.random.default_rng(4)
    ids = np.array([generator.permutation(len(P)) for _ in range(rows)])
    logits = np.tile(np.log(P), (rows, 1)).astype(np.float32)
    whole = np.take_along_axis(logits, np.argsort(ids, axis=1), axis=1)
    return Answer(ids, logits, np.zeros(rows, np.float32), whole)


def chosen_after(children, **options):
    """The token that is chosen where these ranks are drafted; P is in their order."""
    rows = Rows([0, *children], [-1, *[0] * len(children)], Kind.DETERMINISTIC)
    answer = answer_of(1 + len(children))
    answer.candidates[0] = range(len(P))
    choose = tolerant(**options).choose
    return choose(rows, answer, range(len(rows)), Chooser(Sampling()))[0]


def test_tolerant_takes_the_top_within_the_tolerance():
    """The gaps to the best are 0, 0.51, 1.20 and 2.30 nats."""
    for top in (1, 2, 3, 4):
        for tolerance, near in ((0.0, 1), (0.6, 2), (1.3, 3), (9.0, 4)):
            for token in range(len(P)):
                passes = token < min(top, near)
                found = chosen_after([token], top=top, tolerance=tolerance)
                assert found == (token if passes else 0), (top, tolerance, token)
    # Of several, the most probable wins.
    assert chosen_after([2, 1, 3], top=4, tolerance=9.0) == 1


def accepted_of(chain, answer, **options):
    rows = Rows.chain([0, *chain], Kind.DETERMINISTIC)
    chosen = tolerant(**options).choose(
        rows, answer, range(len(rows)), Chooser(Sampling())
    )
    return len(rows.walk(chosen)) - 1


def test_acceptance_grows_with_the_top_and_the_tolerance():
    """Of random chains; with one best token, or no tolerance, it is the walk's."""
    generator, answer = np.random.default_rng(2), answer_of(9)
    counts = {}
    for _ in range(60):
        chain = generator.integers(len(P), size=8).tolist()
        # Mostly likely tokens, or nothing would be accepted.
        for place in range(8):
            if generator.random() < 0.7:
                chain[place] = int(answer.candidates[place, generator.integers(2)])
        greedy = Rows.chain([0, *chain], Kind.DETERMINISTIC).walk(
            answer.candidates[:, 0].tolist()
        )
        found = {}
        for key in itertools.product((1, 2, 3, 4), (0.0, 0.6, 1.3, 9.0)):
            top, tolerance = key
            found[key] = accepted_of(chain, answer, top=top, tolerance=tolerance)
            counts[key] = counts.get(key, 0) + found[key]
            if top == 1 or tolerance == 0.0:
                assert found[key] == len(greedy) - 1
            smaller = (f for k, f in found.items() if k[0] <= top and k[1] <= tolerance)
            assert found[key] == max(smaller)
    assert counts[1, 9.0] < counts[2, 9.0] < counts[3, 9.0] < counts[4, 9.0]
    assert counts[4, 0.0] < counts[4, 0.6] < counts[4, 1.3] < counts[4, 9.0]


def test_a_sampled_text_keeps_to_its_filters():
    answer, rows = answer_of(2), Rows.chain([0, 2], Kind.DETERMINISTIC)
    answer.candidates[0] = range(len(P))
    choose = tolerant(top=4, tolerance=9.0).choose
    for kept, wanted in ((2, {0, 1}), (3, {2})):
        assert {
            choose(rows, answer, (5, 6), Chooser(Sampling(0.9, kept, seed=seed)))[0]
            for seed in range(40)
        } == wanted


def test_lossy_verifiers_say_so_and_are():
    assert VERIFIERS["typical"].lossy
    assert VERIFIERS["tolerant"].lossy
    assert np.abs(accepted("typical", [1]) - P).max() > 0.1
