pytest_plugins = ["pytester"]

TESTS = """
import subprocess

import pytest
import torch

from jetdraft.errors import OptionError
from jetdraft.export.exporter import export
from jetdraft.train.training import Training
from tests.programs import python


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    return export("target", tmp_path_factory.mktemp("bundle"), "drafter")


def test_a_fixture_that_exports(exported): ...


def test_another(exported): ...


def test_a_training():
    Training(None, "target", None, [])


def test_an_optimizer():
    torch.optim.AdamW([torch.zeros(1)])


def test_a_process():
    python("")


def test_a_process_that_no_test_starts():
    subprocess.run(["true"], check=True)


def test_an_export_that_is_refused(tmp_path):
    with pytest.raises(OptionError, match="a bundle has one drafter"):
        export("target", tmp_path, drafter="drafter", head="head")
"""


def test_what_is_slow_is_skipped(pytester):
    pytester.makepyfile(TESTS)
    ended = pytester.runpytest_inprocess("-p", "tests.fast", "--fast")
    ended.assert_outcomes(skipped=5, passed=2)
