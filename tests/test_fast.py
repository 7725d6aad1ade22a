"""What `pytest --fast` leaves out is found in the code of tests and fixtures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_help import test_old_verbs_are_gone as of_the_command_line
from tests.cli.test_train import test_a_missing_target as of_a_training
from tests.conftest import bundle, pair
from tests.export.test_function import test_it_exports_a_pair as of_exports
from tests.fast import is_slow
from tests.server.test_desk import test_clients_take_turns as of_a_queue


@pytest.mark.parametrize(
    ("function", "slow"),
    [
        (bundle, True),
        (pair, False),
        (of_a_training, True),
        (of_exports, True),
        (of_the_command_line, False),
        (of_a_queue, False),
    ],
)
def test_an_export_is_found_behind_helpers(function, slow):
    assert is_slow(function) == slow


def test_both_kinds_are_collected():
    root = Path(__file__).parents[1]
    files = ("tests/cli/test_help.py", "tests/cli/test_bench.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--fast", "--collect-only", "-q", *files],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert files[0] in done.stdout, done.stdout
    assert files[1] not in done.stdout
