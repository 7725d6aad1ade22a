"""What `pytest --fast` leaves out is found in the code of tests and fixtures."""

import pytest

from tests.cli.test_help import test_wrong_usage_is_refused_in_one_line as of_a_command
from tests.cli.test_train import test_a_missing_target as of_a_training
from tests.conftest import bundle, pair
from tests.export.test_function import test_it_exports_a_pair as of_exports
from tests.fast import is_slow
from tests.fuzz.test_subjects import test_an_attack_finds_nothing as of_attacks
from tests.programs import ROOT
from tests.runtime.method_bundles import MethodBundles
from tests.server.serving import served, started
from tests.server.test_request_queue import test_clients_take_turns as of_a_queue


@pytest.mark.parametrize(
    ("function", "slow"),
    [
        (bundle, True),
        (pair, False),
        (of_a_training, True),
        (of_exports, True),
        (of_a_command, False),
        (of_a_queue, False),
        (served, False),
        (started, True),  # a process
        (of_attacks, True),  # behind names of modules
    ],
)
def test_an_export_is_found_behind_helpers(function, slow):
    assert is_slow(function) == slow


@pytest.mark.parametrize(("method", "slow"), [("eagle", False), ("medusa", True)])
def test_of_a_table_the_rows_of_a_test_count(method, slow):
    assert is_slow(MethodBundles, frozenset([method])) == slow


def test_both_kinds_are_collected(capsys):
    fast, slow = ("tests/cli/test_help.py", "tests/cli/test_bench.py")
    files = [str(ROOT / file) for file in (fast, slow)]
    how = ("--fast", "--collect-only", "-q", "-p", "no:cacheprovider")
    pytest.main([*how, f"--rootdir={ROOT}", *files])
    collected = capsys.readouterr().out
    assert fast in collected, collected
    assert slow not in collected
