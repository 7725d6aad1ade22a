import itertools

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts import noise
from jetdraft.runtime.drafts.noise import BLOCK, Distribution, exponentials, gumbel
from jetdraft.runtime.drafts.rows import Kind, Rows
from jetdraft.runtime.passes.answer import Answer
from jetdraft.runtime.sampling.chooser import Chooser, Sampling
from jetdraft.runtime.sampling.verifiers import VERIFIERS
from tests import cases

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
CHAIN, TREE = Rows.chain([5, 6, 7, 8]), Rows([5, 6, 7, 8], [-1, 0, 0, 2])
BINS = 64
LIMIT_63 = 117.0  # chi-square, 63 degrees of freedom, p = 1e-4, rounded up
POSITIONS = np.arange(400)[:, None]
IDS = np.arange(1000)[None, :]


def pairs(count=10):
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


@cases(
    "name, kind, expected",
    ("recursive", Kind.REPLACED, (0.7, 0.83, 0.847)),
    ("recursive", Kind.DISTINCT, (0.7, 0.8419642857, 0.881925)),
    ("k-seq", Kind.REPLACED, (0.7, 0.84, 0.875)),
    ("greedy-plus-one", Kind.TOP_AND_ONE, (0.7, 0.8666666667, 1.0)),
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
    assert chosen_after([2, 1, 3], top=4, tolerance=9.0) == 1


def accepted_of(chain, answer, **how):
    rows = Rows.chain([0, *chain], Kind.DETERMINISTIC)
    chosen = tolerant(**how).choose(rows, answer, range(len(rows)), Chooser(Sampling()))
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


@cases(
    "rows, chosen, path",
    (CHAIN, [6, 7, 9, 1], [0, 1, 2]),
    (CHAIN, [9, 7, 8, 1], [0]),
    (CHAIN, [6, 7, 8, 1], [0, 1, 2, 3]),
    (CHAIN, [1, 7, 8, 9], [0]),
    (TREE, [7, 1, 8, 4], [0, 2, 3]),
    (TREE, [6, 1, 8, 4], [0, 1]),
    (Rows([5, 6, 6], [-1, 0, 0]), [6, 1, 1], [0, 1]),
)
def test_the_walk_ends_at_the_first_wrong_token(rows, chosen, path):
    assert rows.walk(chosen) == path


def test_parents_depths_ancestors_and_children():
    rows = Rows.chain([5, 6, 7])
    assert (rows.parents, rows.depths, rows.drafted) == ([-1, 0, 1], [0, 1, 2], 2)
    rows = TREE
    assert rows.depths == [0, 1, 1, 2]
    assert rows.ancestors == [[], [0], [0], [0, 2]]
    assert [rows.children(row) for row in range(4)] == [[1, 2], [], [3], []]


def test_the_first_rows_of_a_tree_are_a_tree():
    rows = Rows([5, 6, 7, 8], [-1, 0, 0, 2], Kind.DISTINCT)
    assert rows.cut(2) == Rows([5, 6, 7], [-1, 0, 0], Kind.DISTINCT)
    assert rows.cut(9) is rows


def test_a_tree_under_a_path():
    q = Distribution(np.array([6, 7]), np.array([0.5, 0.5]))
    rows = Rows([5, 6, 7], [-1, 0, 0], Kind.DISTINCT, {0: q}).under([1, 2])
    assert rows.tokens == [1, 2, 5, 6, 7]
    assert rows.parents == [-1, 0, 1, 2, 2]
    assert rows.drawn_from == {2: q}


def test_depth_first_keeps_the_tree_and_the_order_of_siblings():
    #    0 - 1 - 3 - 5        the first child of each row comes right after it
    #      \ 2 - 4
    q = Distribution(np.array([6]), np.array([1.0]))
    rows = Rows([0, 10, 20, 30, 40, 50], [-1, 0, 0, 1, 2, 3], drawn_from={2: q})
    found = rows.depth_first()
    assert found.tokens == [0, 10, 30, 50, 20, 40]
    assert found.parents == [-1, 0, 1, 2, 0, 4]
    assert found.drawn_from == {4: q}


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([], []), ([1], [0]), ([1, 2], [-1, 1]), ([1, 2, 3], [-1, 2, 0]), ([1, 2], [-1])],
)
def test_what_is_no_tree_is_refused(tokens, parents):
    with pytest.raises(OptionError):
        Rows(tokens, parents).check()


def uniforms(seed, positions, ids):
    """An exponential variate is -log of a uniform one."""
    return np.exp(-exponentials(seed, positions, ids))


def chi_square(counts):
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def pair_counts(first, second, bins=8):
    """How often (first, second) fall into each cell of a bins x bins grid."""
    counts, _, _ = np.histogram2d(
        first.ravel(), second.ravel(), bins=bins, range=[[0, 1], [0, 1]]
    )
    return counts


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**63, -1])
def test_uniform(seed):
    values = uniforms(seed, POSITIONS, IDS)
    assert values.min() > 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=BINS, range=(0, 1))
    assert chi_square(counts) < LIMIT_63


def test_independent_across_positions_ids_and_seeds():
    values = uniforms(3, POSITIONS, IDS)
    for lag in (1, 2, 7):
        assert chi_square(pair_counts(values[:-lag], values[lag:])) < LIMIT_63
    for lag in (1, 2, 64):
        assert chi_square(pair_counts(values[:, :-lag], values[:, lag:])) < LIMIT_63
    for seed in (4, 5, 3 + (1 << 32)):
        other = uniforms(seed, POSITIONS, IDS)
        assert chi_square(pair_counts(values, other)) < LIMIT_63


def test_no_position_and_id_trade_places():
    values = uniforms(0, np.arange(300)[:, None], np.arange(300)[None, :])
    assert len(np.unique(values)) == values.size


def test_does_not_depend_on_what_is_asked_with_it():
    whole = gumbel(9, POSITIONS, IDS)
    part = gumbel(9, np.array([[17]]), np.array([[5, 900, 3]]))
    assert part.tolist() == [[whole[17, 5], whole[17, 900], whole[17, 3]]]


def test_a_seed_keeps_its_noise():
    """The text of a seed is a promise. At position 12 token 164 wins block 0."""
    values = gumbel(7, np.array([[12], [4095]]), np.array([[164, 255, 256, 151935]]))
    assert values[0] == pytest.approx([5.951247, 0.552012, 1.496627, 0.820307], 1e-5)
    assert values[1] == pytest.approx([0.985317, 0.869655, -0.613698, 0.525854], 1e-5)


def test_gumbel_moments():
    values = gumbel(1, POSITIONS, IDS)
    assert values.mean() == pytest.approx(0.5772, abs=0.01)
    assert values.var() == pytest.approx(np.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("vocab_size", [1, 255, 1000, 4 * BLOCK])
@pytest.mark.parametrize("most", [1e-9, 1e-3, 0.1, 3.0])
def test_quiet_tokens_are_those_below_the_limit(vocab_size, most):
    places = POSITIONS[:50]
    values = exponentials(3, places, np.arange(vocab_size)[None])
    limits = np.full(50, most)
    rows, ids, quiets = noise.exponentials_below(3, places.ravel(), vocab_size, limits)
    assert list(zip(rows, ids, strict=True)) == list(
        zip(*np.nonzero(values < most), strict=True)
    )
    assert np.array_equal(quiets, values[rows, ids])


@pytest.mark.parametrize("lag", [0, 1, 17])
def test_independent_inside_a_block(lag):
    values = exponentials(5, np.arange(40_000)[:, None], np.arange(64)[None])
    assert chi_square(np.bincount(values.argmin(1), minlength=64)) < LIMIT_63
    first, second = np.exp(-values[:, lag]), np.exp(-values[:, lag + 1])
    assert chi_square(pair_counts(first, second)) < LIMIT_63
