"""The trained drafter of a test file, loaded, and what plain decoding writes.

A file with drafters has a fixture `bundles`, whose key "trained" is used.
"""

from __future__ import annotations

import pytest

import jetdraft
from tests.train.attached.drafts import LONG, WAYS
from tests.train.periodic import PERIOD


@pytest.fixture(scope="module")
def model(bundles):
    with jetdraft.load(bundles["trained"].path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def plain(model):
    """The texts of plain decoding, greedy and sampled."""
    return [
        model.generate(PERIOD, method="none", **LONG, **way).token_ids for way in WAYS
    ]
