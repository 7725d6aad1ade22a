"""What scripts compute: scores of answers, and the constants of the cost model."""

import statistics

import pytest
from human_eval import solves
from roofline import fit, leave_one_out, read, runtime_mb
from tasks import rouge_l

from jetdraft.devices.planning.cost_model import FITTED, RUNTIME_MB


@pytest.mark.parametrize(
    ("one", "other", "score"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0),
        ([1, 2, 3, 4], [1, 3, 4, 9], 0.75),
        ([3, 2, 1], [1, 2, 3], 1 / 3),
        ([1, 2], [1, 2, 3, 4], 4 / 6),
        ([], [1], 0.0),
        ([], [], 1.0),
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(one, other, score):
    assert rouge_l(one, other) == pytest.approx(score)
    assert rouge_l(other, one) == pytest.approx(score)


TASK = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(3) == 6\n",
}


@pytest.mark.parametrize(
    ("answer", "solved"),
    [
        ("Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", True),
        ("def double(x):\n    return 2 * x", True),
        ("def double(x):\n    return x", False),
        ("raise SystemExit(0)", False),
        ("no code", False),
    ],
)
def test_an_answer_is_solved_if_all_tests_ran_and_passed(answer, solved):
    assert solves(TASK, answer) is solved


def test_the_constants_are_those_that_fit_the_published_rows():
    records, table = read()
    efficiency = fit(records)
    assert efficiency.bandwidth == pytest.approx(FITTED.bandwidth, rel=0.01)
    assert efficiency.pass_ms == pytest.approx(FITTED.pass_ms, rel=0.01)
    assert efficiency.compute == pytest.approx(FITTED.compute, rel=0.01)
    memory = runtime_mb(records, table["capacity"])
    assert memory == pytest.approx(RUNTIME_MB, rel=0.01)


def test_each_published_row_is_predicted_from_the_others():
    """Plain decoding within 15% (median) and 30% (worst), memory within 20%."""
    records, table = read()
    errors = leave_one_out(records, table["capacity"])
    speeds = [abs(error.speed) for error in errors]
    assert len(speeds) == len(records) >= 20
    assert statistics.median(speeds) < 0.15
    assert max(speeds) < 0.30
    memory = [abs(error.memory) for error in errors if error.memory is not None]
    assert len(memory) == 20
    assert max(memory) < 0.20


def test_trees_of_sixty_rows_keep_their_published_share():
    """The speed-up of a tree, as a share of its tokens per pass."""
    records, table = read()
    for tree in table["trees"]:
        [record] = [
            record
            for record in records
            if (record.device.name, record.model) == (tree["device"], tree["model"])
        ]
        share = record.predict_ms(FITTED) / record.predict_ms(FITTED, 60)
        published = tree["speedup"] / tree["tokens_per_pass"]
        assert share == pytest.approx(published, rel=0.27)
