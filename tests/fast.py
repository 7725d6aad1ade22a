"""`pytest --fast` skips a test or a fixture where it exports, trains or spawns."""

import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

SLOW = (
    "jetdraft.export.exporter._load_checkpoints",
    "jetdraft.train.training.Training.__init__",
    "torch.onnx.export",
    "torch.optim.Optimizer.__init__",
)
"""Calls with which an export or a training begins."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="quick tests only")


@pytest.fixture(scope="session", autouse=True)
def fast(pytestconfig: pytest.Config) -> Iterator[None]:
    start = subprocess.Popen.__init__

    def skip(*_arguments: Any, **_options: Any) -> None:
        pytest.skip("slow")

    def start_or_skip(*arguments: Any, **options: Any) -> None:
        frames = traceback.walk_stack(sys._getframe(1))
        rooms = (frame.f_globals["__name__"] for frame, _ in frames)
        caller = next(room for room in rooms if room != "subprocess")
        # The package has quick processes of its own.
        if caller.startswith("tests."):
            skip()
        start(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--fast"):
            patch.setattr(subprocess.Popen, "__init__", start_or_skip)
            for place in SLOW:
                patch.setattr(place, skip)
        yield
