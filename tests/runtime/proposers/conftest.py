"""What the tests of proposers share."""

from __future__ import annotations

import time

import pytest

from jetdraft.runtime.passes.graph import Graph


@pytest.fixture
def slow_target(monkeypatch):
    """A pass of the target takes 2 ms more, whatever its width: drafts would pay."""
    run = Graph._run

    def slowly(graph, binding, cursor):
        answer = run(graph, binding, cursor)
        if graph.contract.feature_size:
            time.sleep(2e-3)
            graph.seconds += 2e-3
        return answer

    monkeypatch.setattr(Graph, "_run", slowly)
