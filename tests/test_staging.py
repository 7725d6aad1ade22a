import contextlib
import json
import os
import resource
import sys
from pathlib import Path

import pytest

from jetdraft import files, staging
from jetdraft.errors import OutputError
from jetdraft.staging import writing
from jetdraft.testing import toy_bundle
from tests.kills import content, fill, make
from tests.programs import ROOT, printed, python


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle")


def test_writing_makes_the_folder_appear_whole(tmp_path):
    output = tmp_path / "deep" / "er" / "bundle"
    with writing(output) as folder:
        fill(folder, "new")
        assert not output.exists()
    assert content(output) == "new"
    assert os.listdir(output.parent) == ["bundle"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_writing_replaces_a_bundle(small, monkeypatch, can_exchange):
    if not can_exchange:  # two renames take the place of the atomic exchange
        monkeypatch.setattr(staging, "_exchange_folders", lambda one, other: False)
    with writing(small) as folder:
        fill(folder, "new")
        assert content(small) == "made"
    assert content(small) == "new"
    assert os.listdir(small.parent) == ["bundle"]


def write_and_fail(output: Path, failure: type[BaseException]) -> None:
    with writing(output) as folder:
        fill(folder, "new")
        raise failure("on purpose")


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failed_writing_leaves_what_was_there(small, failure):
    for name in ("bundle", "first"):
        with pytest.raises(failure, match="on purpose"):
            write_and_fail(small.parent / name, failure)
    assert content(small) == "made"
    assert os.listdir(small.parent) == ["bundle"]


@pytest.mark.parametrize(
    ("place", "said"),
    [("", "is not a bundle"), ("file", "is not a bundle"), ("file/b", "cannot write")],
)
def test_what_is_no_bundle_is_not_touched(tmp_path, place, said):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match=said), writing(tmp_path / place):
        pytest.fail("got as far as writing")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("before", [None, "old"])
def test_link_stays_and_the_bundle_behind_it_is_replaced(tmp_path, before):
    (tmp_path / "link").symlink_to(tmp_path / "bundle")
    if before:
        make(tmp_path / "bundle", before)
    with writing(tmp_path / "link") as folder:
        fill(folder, "new")
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "bundle") == "new"
    assert sorted(os.listdir(tmp_path)) == ["bundle", "link"]


def test_a_name_that_leaves_no_room_for_the_partial_name_is_noticed_first(tmp_path):
    with pytest.raises(OutputError, match="File name too long"):
        staging.check_output(tmp_path / "new" / ("x" * 240))
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_noticed_first(tmp_path):
    """A limit of file sizes refuses as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OutputError, match=r"File too large.*free some space"):
            staging.check_output(tmp_path / "new" / "bundle")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_leftovers_of_dead_processes_are_swept_and_others_kept(tmp_path):
    dead, alive = (tmp_path / f".bundle.partial-{name}" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "half").write_text("half")
    with files.locked(alive) as free:
        assert free
        with writing(tmp_path / "bundle") as folder:
            fill(folder, "new")
    assert sorted(os.listdir(tmp_path)) == [alive.name, "bundle"]


def test_a_kill_between_two_renames_is_undone_by_the_next_export(tmp_path):
    make(tmp_path / ".bundle.old", "old")
    with contextlib.suppress(RuntimeError), writing(tmp_path / "bundle"):
        raise RuntimeError("this export fails too")
    assert content(tmp_path / "bundle") == "old"
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("before", [None, "old"])
def test_bundle_survives_a_kill_at_any_point(tmp_path, before):
    # A process of its own: forking one that holds torch takes far too long.
    arguments = [str(tmp_path), *([before] if before else [])]
    report = printed(sys.executable, "-m", "tests.kills", *arguments, cwd=ROOT)
    report = json.loads(report)
    assert report["kills"] > 100, "the profiler saw too little"
    assert report["found"] == [before, "new"]


def test_a_system_without_file_locks_is_one_line(tmp_path):
    """Windows has no fcntl and no sched_getaffinity; what needs no lock works there."""
    code = (
        "import os, sys\n"
        "sys.modules |= {'fcntl': None, 'resource': None}\n"
        "del os.sched_getaffinity\n"
        "import jetdraft\n"
        "from jetdraft.staging import writing\n"
        "model = jetdraft.load(sys.argv[1])\n"
        "assert model.generate('The robot', max_new_tokens=3).token_ids\n"
        "try:\n"
        "    with writing(sys.argv[2]):\n"
        "        pass\n"
        "except jetdraft.OutputError as error:\n"
        "    print(error)\n"
    )
    folders = [str(toy_bundle(tmp_path / "toy")), str(tmp_path / "new")]
    assert "no file locks; use jetdraft on Linux" in python(code, *folders)
    assert not (tmp_path / "new").exists()
