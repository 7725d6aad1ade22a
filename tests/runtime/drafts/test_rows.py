import numpy as np
import pytest

from jetdraft.errors import OptionError
from jetdraft.runtime.drafts.noise import Distribution
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
