from jetdraft.runtime.rows import Rows


def test_chain_parents_and_depths():
    rows = Rows.chain([5, 6, 7])
    assert rows.parents == [-1, 0, 1]
    assert rows.depths == [0, 1, 2]
    assert rows.drafted == 2


def test_walk_stops_at_the_first_wrong_token():
    rows = Rows.chain([5, 6, 7, 8])
    assert rows.walk([6, 7, 9, 1]) == [0, 1, 2]
    assert rows.walk([9, 7, 8, 1]) == [0]
    assert rows.walk([6, 7, 8, 1]) == [0, 1, 2, 3]


def test_walk_does_not_resume_after_a_wrong_token():
    assert Rows.chain([5, 6, 7, 8]).walk([1, 7, 8, 9]) == [0]


def test_walk_takes_the_branch_that_matches():
    #      0:5
    #     /   \
    #   1:6   2:7
    #          |
    #         3:8
    rows = Rows([5, 6, 7, 8], [-1, 0, 0, 2])
    assert rows.depths == [0, 1, 1, 2]
    assert rows.walk([7, 1, 8, 4]) == [0, 2, 3]
    assert rows.walk([6, 1, 8, 4]) == [0, 1]


def test_walk_takes_one_of_equal_siblings():
    rows = Rows([5, 6, 6], [-1, 0, 0])
    assert rows.walk([6, 1, 1]) == [0, 1]
