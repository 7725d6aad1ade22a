"""The trained drafter of a test file, loaded, and what plain decoding writes."""

from pathlib import Path

import pytest

import jetdraft
from jetdraft.bundle import Bundle
from tests.train.attached.drafts import LONG, STILL, WAYS, int4
from tests.train.periodic import PERIOD, made


@pytest.fixture(scope="module")
def folders(request, target, tmp_path_factory) -> dict[str, Path]:
    """The folders of a trained drafter, and of a drafter as it begins."""
    folder, text = tmp_path_factory.mktemp("drafters"), Path(target).parent / "text.txt"
    module, settings = request.module, getattr(request.module, "SETTINGS", None)
    for name, options in (("trained", module.LEARNING), ("untrained", STILL)):
        made(module.TASK, target, folder / name, [text], settings, options).run()
    return {name: folder / name for name in ("trained", "untrained")}


@pytest.fixture(scope="module")
def bundles(target, folders, tmp_path_factory) -> dict[str, Bundle]:
    output = tmp_path_factory.mktemp("bundles")
    return {n: int4(target, output / n, head=head) for n, head in folders.items()}


@pytest.fixture(scope="module")
def model(bundles):
    with jetdraft.load(bundles["trained"].path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def plain(model):
    return [
        model.generate(PERIOD, method="none", **LONG, **way).token_ids for way in WAYS
    ]
