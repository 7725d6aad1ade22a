from __future__ import annotations

import pytest
from human_eval import solves

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
