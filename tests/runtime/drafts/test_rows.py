"""Rows of a draft, and the noise that chooses: uniform and independent."""

import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.noise import (
    BLOCK,
    Distribution,
    exponentials,
    exponentials_below,
    gumbel,
)
from jetdraft.runtime.drafts.rows import Kind, Rows


def test_chain_parents_and_depths():
    rows = Rows.chain([5, 6, 7])
    assert rows.parents == [-1, 0, 1]
    assert rows.depths == [0, 1, 2]
    assert rows.drafted == 2


CHAIN, TREE = Rows.chain([5, 6, 7, 8]), Rows([5, 6, 7, 8], [-1, 0, 0, 2])


@pytest.mark.parametrize(
    ("rows", "chosen", "path"),
    [
        (CHAIN, [6, 7, 9, 1], [0, 1, 2]),
        (CHAIN, [9, 7, 8, 1], [0]),
        (CHAIN, [6, 7, 8, 1], [0, 1, 2, 3]),
        (CHAIN, [1, 7, 8, 9], [0]),
        (TREE, [7, 1, 8, 4], [0, 2, 3]),
        (TREE, [6, 1, 8, 4], [0, 1]),
        (Rows([5, 6, 6], [-1, 0, 0]), [6, 1, 1], [0, 1]),
    ],
)
def test_the_walk_ends_at_the_first_wrong_token(rows, chosen, path):
    assert rows.walk(chosen) == path


def test_ancestors_and_children():
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


BINS = 64
LIMIT_63 = 117.0  # chi-square, 63 degrees of freedom, p = 1e-4, rounded up
POSITIONS = np.arange(400)[:, None]
IDS = np.arange(1000)[None, :]


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
    """(position, id) pairs with equal sums or products must not collide."""
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
    positions = POSITIONS[:50]
    values = exponentials(3, positions, np.arange(vocab_size)[None])
    limits = np.full(50, most)
    rows, ids, quiets = exponentials_below(3, positions.ravel(), vocab_size, limits)
    assert list(zip(rows, ids, strict=True)) == list(
        zip(*np.nonzero(values < most), strict=True)
    )
    assert np.array_equal(quiets, values[rows, ids])


@pytest.mark.parametrize("lag", [0, 1, 17])
def test_independent_inside_a_block(lag):
    """Any token can be the loudest of its block, and the others do not know which."""
    values = exponentials(5, np.arange(40_000)[:, None], np.arange(64)[None])
    assert chi_square(np.bincount(values.argmin(1), minlength=64)) < LIMIT_63
    first, second = np.exp(-values[:, lag]), np.exp(-values[:, lag + 1])
    assert chi_square(pair_counts(first, second)) < LIMIT_63
