from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.train.periodic import learned_target, write_periodic


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_periodic(tmp_path / "text.txt")


@pytest.fixture(scope="session")
def learned_targets(once) -> Callable[[int], str]:
    def of(layers: int) -> str:
        make = partial(learned_target, layers=layers)
        return str(once(f"learned-{layers}", make) / "tuned")

    return of


@pytest.fixture(scope="module")
def target(request, learned_targets) -> str:
    return learned_targets(request.module.LAYERS)
