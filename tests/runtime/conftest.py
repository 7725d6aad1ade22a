import shutil
import time

import pytest

from jetdraft.runtime.passes.binding import PassBinding
from jetdraft.runtime.passes.graph import Graph
from tests.runtime.method_bundles import MethodBundles

TARGET_SECONDS = 2e-3
DRAFTER_SECONDS = 2e-4


class Clock:
    """Passes move this clock; each look at it adds a microsecond."""

    def __init__(self) -> None:
        self.now = self.pass_seconds = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture
def steady_passes(monkeypatch):
    """A target's pass moves the clock by a fixed time, other passes by a tenth."""
    clock, ready, run = Clock(), Graph._set_inputs, PassBinding.run

    def steadily_ready(graph, binding, cursor):
        is_target = graph.contract.feature_size > 0
        clock.pass_seconds = TARGET_SECONDS if is_target else DRAFTER_SECONDS
        return ready(graph, binding, cursor)

    def steadily(bound, options=None):
        run(bound, options)
        clock.now += clock.pass_seconds
        return clock.pass_seconds

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Graph, "_set_inputs", steadily_ready)
    monkeypatch.setattr(PassBinding, "run", steadily)


@pytest.fixture
def own(bundle, tmp_path):
    left_out = shutil.ignore_patterns("profiles")
    return shutil.copytree(bundle, tmp_path / "own", ignore=left_out)


@pytest.fixture(scope="session")
def method_bundles(tmp_path_factory):
    return MethodBundles(tmp_path_factory.mktemp("methods"))
