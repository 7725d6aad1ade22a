import shutil
from pathlib import Path

import pytest

import jetdraft
from jetdraft.cli import console
from tests import read_manifest, write_manifest


@pytest.fixture(scope="session")
def bundle(bundle: Path) -> Path:
    for threads in (None, 1):
        with jetdraft.load(bundle, threads=threads) as model:
            model.parts.survey.begin()
    return bundle


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 600.0)


@pytest.fixture
def copied_bundle(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "bundle")


@pytest.fixture(scope="session")
def lone_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(bundle, tmp_path_factory.mktemp("lone") / "bundle")
    manifest = read_manifest(copy)
    del manifest["graphs"]["drafter"]
    for file in copy.glob("drafter*"):
        file.unlink()
        del manifest["files"][file.name]
    write_manifest(copy, manifest)
    return copy
