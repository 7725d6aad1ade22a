from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jetdraft.bundle
from jetdraft.bundle import MANIFEST, Bundle, check_pair, writing
from jetdraft.errors import BundleError, ContractError, OutputError, PairError
from tests.kills import CONTRACT, content, fill, make


def edit(folder: Path, **changes: object) -> None:
    """Change fields of the manifest."""
    file = folder / MANIFEST
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle")


def test_opens_what_was_saved(small):
    opened = Bundle.open(small)
    assert opened.target.contract == CONTRACT
    assert opened.drafter is not None
    assert opened.methods == ("none", "lookup")
    assert opened.eos_token_ids == (0,)
    assert opened.tokenizer is None
    assert set(opened.files) == {
        f"{name}.onnx{end}" for name in ("target", "drafter") for end in ("", ".data")
    }


def test_hash_depends_on_every_file(small, tmp_path):
    other = make(tmp_path / "other", "other")
    assert Bundle.open(small).sha256 != Bundle.open(other).sha256
    again = make(tmp_path / "again")
    assert Bundle.open(small).sha256 == Bundle.open(again).sha256


def test_extra_files_beside_the_bundle_do_no_harm(small):
    (small / "profiles").mkdir()
    (small / "profiles" / "cpu-1.json").write_text("{}")
    assert content(small) == "made"


def test_real_bundle_opens(bundle):
    opened = Bundle.open(bundle)
    assert opened.tokenizer == bundle / "tokenizer.json"
    assert opened.target.contract.capacity == 256


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"no bundle at .*make one with"):
        Bundle.open(tmp_path / "nothing")


def test_folder_without_manifest_is_refused(tmp_path):
    with pytest.raises(BundleError, match=r"has no bundle.json"):
        Bundle.open(tmp_path)


def test_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="no bundle at"):
        Bundle.open(tmp_path / "file")


def test_missing_file_is_refused(small):
    (small / "drafter.onnx.data").unlink()
    with pytest.raises(BundleError, match=r"drafter.onnx.data is missing"):
        Bundle.open(small)


def test_truncated_file_is_refused(small):
    file = small / "target.onnx.data"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BundleError, match="has 39 bytes instead of 40"):
        Bundle.open(small)


def test_altered_file_is_refused(small):
    file = small / "target.onnx.data"
    file.write_bytes(b"M" + file.read_bytes()[1:])
    with pytest.raises(BundleError, match="was altered"):
        Bundle.open(small)


@pytest.mark.parametrize(
    ("version", "advice"), [(99, "update jetdraft"), (0, "export the bundle again")]
)
def test_other_schema_is_refused(small, version, advice):
    edit(small, schema_version=version)
    with pytest.raises(BundleError, match=f"schema {version}.*{advice}"):
        Bundle.open(small)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\x00", '"x"'])
def test_manifest_that_is_no_manifest_is_refused(small, text):
    (small / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="is damaged; export the bundle again"):
        Bundle.open(small)


def test_manifest_that_is_not_text_is_refused(small):
    (small / MANIFEST).write_bytes(b"\xff\xfe{}")
    with pytest.raises(BundleError, match="is damaged"):
        Bundle.open(small)


@pytest.mark.parametrize(
    "field", ["graphs", "methods", "eos_token_ids", "provider", "tools", "files"]
)
def test_manifest_without_a_field_is_refused(small, field):
    manifest = json.loads((small / MANIFEST).read_text())
    del manifest[field]
    (small / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="is malformed"):
        Bundle.open(small)


@pytest.mark.parametrize(
    "damage",
    [
        {"graphs": []},
        {"graphs": {}},
        {"graphs": {"target": {}}},
        {"graphs": {"target": 5}},
        {"methods": 5},
        {"methods": [["none"]]},
        {"eos_token_ids": None},
        {"eos_token_ids": ["0"]},
        {"provider": 5},
        {"tools": []},
        {"files": []},
        {"files": {}},
        {"files": 5},
        {"files": {"target.onnx": {}, "drafter.onnx": {}}},
        {"files": {"target.onnx": 5, "drafter.onnx": 5}},
    ],
)
def test_manifest_with_a_wrong_field_is_refused(small, damage):
    edit(small, **damage)
    with pytest.raises(BundleError):
        Bundle.open(small)


def test_manifest_cannot_name_files_outside_the_bundle(small, tmp_path):
    manifest = json.loads((small / MANIFEST).read_text())
    (small / "target.onnx").rename(tmp_path / "target.onnx")
    manifest["files"]["../target.onnx"] = manifest["files"].pop("target.onnx")
    manifest["graphs"]["target"]["file"] = "../target.onnx"
    edit(small, **manifest)
    with pytest.raises(BundleError, match="malformed"):
        Bundle.open(small)


def test_malformed_contract_is_refused(small):
    manifest = json.loads((small / MANIFEST).read_text())
    del manifest["graphs"]["target"]["contract"]["capacity"]
    edit(small, **manifest)
    with pytest.raises(ContractError, match=r"contract in bundle.json is malformed"):
        Bundle.open(small)


@pytest.mark.parametrize("field", ["vocab_size", "capacity"])
def test_pair_that_does_not_match_is_refused(small, field):
    manifest = json.loads((small / MANIFEST).read_text())
    manifest["graphs"]["drafter"]["contract"][field] += 1
    edit(small, **manifest)
    with pytest.raises(PairError, match=r"drafter's (vocabulary|capacity)"):
        Bundle.open(small)


def test_pair_may_differ_in_everything_else():
    drafter = dataclasses.replace(CONTRACT, kv_shapes=((2, 8),), max_width=4)
    check_pair(CONTRACT, drafter)


def test_writing_makes_the_folder_appear_whole(tmp_path):
    output = tmp_path / "deep" / "er" / "bundle"
    with writing(output) as folder:
        fill(folder, "new")
        assert not output.exists()
    assert content(output) == "new"
    assert os.listdir(output.parent) == ["bundle"]


def test_writing_replaces_a_bundle(small):
    with writing(small) as folder:
        fill(folder, "new")
        assert content(small) == "made"
    assert content(small) == "new"
    assert os.listdir(small.parent) == ["bundle"]


def test_writing_replaces_a_bundle_where_folders_cannot_be_exchanged(
    small, monkeypatch
):
    monkeypatch.setattr(jetdraft.bundle, "_exchange", lambda one, other: False)
    with writing(small) as folder:
        fill(folder, "new")
    assert content(small) == "new"
    assert os.listdir(small.parent) == ["bundle"]


def write_and_fail(output: Path, failure: type[BaseException]) -> None:
    with writing(output) as folder:
        fill(folder, "new")
        raise failure("on purpose")


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failed_writing_leaves_what_was_there(small, failure):
    with pytest.raises(failure):
        write_and_fail(small, failure)
    assert content(small) == "made"
    assert os.listdir(small.parent) == ["bundle"]


def test_failed_first_writing_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="on purpose"):
        write_and_fail(tmp_path / "bundle", ValueError)
    assert os.listdir(tmp_path) == []


def test_folder_that_is_no_bundle_is_not_touched(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(OutputError, match="is not a bundle"), writing(tmp_path):
        pytest.fail("got as far as writing")
    assert (tmp_path / "mine").read_text() == "precious"


def test_output_that_is_a_file_is_not_touched(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OutputError, match="not a bundle"), writing(tmp_path / "file"):
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


def test_output_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"), writing(tmp_path / "file/b"):
        pytest.fail("got as far as writing")


def test_leftovers_of_dead_processes_are_swept_and_others_kept(tmp_path):
    dead, alive = (tmp_path / f".bundle.partial-{name}" for name in ("dead", "alive"))
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "half").write_text("half")
    with jetdraft.bundle._locked(alive) as free:
        assert free
        with writing(tmp_path / "bundle") as folder:
            fill(folder, "new")
    assert sorted(os.listdir(tmp_path)) == [alive.name, "bundle"]


def test_without_an_atomic_exchange_the_old_bundle_is_replaced_too(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(jetdraft.bundle, "_exchange", lambda one, other: False)
    make(tmp_path / "bundle", "old")
    with writing(tmp_path / "bundle") as folder:
        fill(folder, "new")
    assert content(tmp_path / "bundle") == "new"
    assert os.listdir(tmp_path) == ["bundle"]


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
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", *arguments],
        cwd=Path(__file__).parents[1],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kills"] > 100, "the profiler saw too little"
    assert report["found"] == [before, "new"]
