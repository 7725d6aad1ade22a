import contextlib
import io
import json
import os
import resource
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from jetdraft import files, manifest, parsing, testing
from jetdraft.bundle import Bundle, check_pair
from jetdraft.errors import BundleError, ContractError, OutputError, PairError
from jetdraft.manifest import MANIFEST, SCHEMA_VERSION, GraphEntry, Halves, writing
from tests import cases, edit_manifest, read_manifest, write_manifest
from tests.kills import CONTRACT, content, fill, make
from tests.programs import ROOT, printed, python
from tests.toy_graphs import GUESSES, IDS, VOCABULARY, write_graph
from tests.toy_graphs import HEAD_CONTRACT as HEAD
from tests.toy_graphs import TARGET_CONTRACT as TARGET

OLDER = SCHEMA_VERSION - 1
HALVES = Halves("l.onnx", "u.onnx", "lc.onnx", "uc.onnx", 1, 48, scores=False)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle")


def test_opens_what_was_saved(small, bundle):
    opened = Bundle.open(small)
    assert opened.target.contract == CONTRACT
    assert opened.drafter is not None
    assert opened.generation == {}
    assert opened.eos_token_ids == (0,)
    assert opened.tokenizer is None
    assert set(opened.files) == {
        f"{name}.onnx{end}" for name in ("target", "drafter") for end in ("", ".data")
    }
    real = Bundle.open(bundle)
    assert real.tokenizer == bundle / "tokenizer.json"
    assert real.target.contract.capacity == 256


def test_the_hash_depends_on_every_file_and_on_the_contract(small, tmp_path):
    other = make(tmp_path / "other", "other")
    assert Bundle.open(small).sha256 != Bundle.open(other).sha256
    again = make(tmp_path / "again")
    assert Bundle.open(small).sha256 == Bundle.open(again).sha256
    edit_manifest(again, eos_token_ids=[1])
    assert Bundle.open(small).sha256 != Bundle.open(again).sha256


def test_extra_files_beside_the_bundle_do_no_harm(small):
    (small / "profiles").mkdir()
    (small / "profiles" / "cpu-1.json").write_text("{}")
    assert content(small) == "made"


def in_place_of_the_folder(bundle):
    shutil.rmtree(bundle)
    bundle.write_text("")


def cut(bundle):
    file = bundle / "target.onnx.data"
    file.write_bytes(file.read_bytes()[:-1])


def alter(bundle):
    file = bundle / "target.onnx.data"
    file.write_bytes(b"M" + file.read_bytes()[1:])


def changed(*route, to=...):
    def damage(bundle):
        manifest = inner = read_manifest(bundle)
        for key in route[:-1]:
            inner = inner[key]
        if to is ...:
            del inner[route[-1]]
        else:
            inner[route[-1]] = to
        write_manifest(bundle, manifest)

    return damage


def outside(bundle):
    manifest = read_manifest(bundle)
    (bundle / "target.onnx").rename(bundle.parent / "target.onnx")
    manifest["files"]["../target.onnx"] = manifest["files"].pop("target.onnx")
    manifest["graphs"]["target"]["file"] = "../target.onnx"
    write_manifest(bundle, manifest)


def with_manifest(text):
    return lambda bundle: (bundle / MANIFEST).write_bytes(text)


def edited(bundle):
    """The hashes of files cover neither the contract nor the ends of text."""
    manifest = read_manifest(bundle)
    manifest["eos_token_ids"].append(5)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


NOT_JSON = (b"", b"{", b"[]", b"null", b"{}", b"\0", b'"x"', b"\xff\xfe{}")
NOT_JSON += (b"[" * 100_000, b'{"schema_version": Infinity}', b"9" * 5000)
FILES = ("target.onnx", "drafter.onnx")
WRONG_VALUES = {
    "graphs": ([], {}, {"target": {}}, {"target": 5}),
    "generation": (5, {"temperature": "0.6"}, {"temperature": True}, {"colour": 1}),
    "eos_token_ids": (None, ["0"]),
    "provider": (5,),
    "tools": ([],),
    "files": ([], {}, 5, *(dict.fromkeys(FILES, x) for x in ({}, 5))),
}
TARGET_ENTRY = ("graphs", "target")
CONTRACT_OF_TARGET = (*TARGET_ENTRY, "contract")


@cases(
    "damage, said",
    (shutil.rmtree, "no bundle at .*make one with"),
    (in_place_of_the_folder, "no bundle at"),
    (lambda bundle: (bundle / MANIFEST).unlink(), "has no bundle.json"),
    (lambda bundle: (bundle / "drafter.onnx.data").unlink(), "onnx.data is miss"),
    (cut, "has 39 bytes instead of 40"),
    (alter, "was altered"),
    (edited, r"bundle.json was altered"),
    (changed("schema_version", to=99), "schema 99.*update jetdraft"),
    *(
        (changed("schema_version", to=n), f"schema {n}.*export the bundle again")
        for n in (0, OLDER)
    ),
    *(
        (with_manifest(text), "is damaged; export or copy the bundle again")
        for text in NOT_JSON
    ),
    *(
        (changed(field), f"is malformed.*{field} is missing")
        for field in ("graphs", "eos_token_ids", "provider", "tools")
    ),
    (changed(*CONTRACT_OF_TARGET, "capacity"), "target.contract.capacity is miss"),
    (outside, "malformed"),
    *(
        (changed(field, to=value), "malformed")
        for field, values in WRONG_VALUES.items()
        for value in values
    ),
    *(
        (changed(*route, to=value), f"malformed.*{words}")
        for route, value, words in [
            ((*CONTRACT_OF_TARGET, "max_width"), 0, "max_width must be 1 to"),
            ((*CONTRACT_OF_TARGET, "max_width"), -2, "max_width must be 1 to"),
            ((*CONTRACT_OF_TARGET, "capacity"), 2**40, "capacity must be 1 to"),
            ((*CONTRACT_OF_TARGET, "dtype"), "float3a", "dtype must be one of fl"),
            ((*CONTRACT_OF_TARGET, "kv_shapes"), [[2, -16]], r"\[0\]\[1\] must"),
            ((*TARGET_ENTRY, "streams"), 5, "streams must be an object"),
            ((*TARGET_ENTRY, "quantization"), {"raised": 5}, "must be a list"),
            (("eos_token_ids",), [-1], r"eos_token_ids\[0\] must be 0 to"),
            (("eos_token_ids",), [2**32], r"eos_token_ids\[0\] must be 0 to"),
            (("files", "target.onnx", "bytes"), 1.5, "must be an integer, not 1.5"),
            (("provider",), "../../x", "provider must be a provider's name"),
        ]
    ),
)
def test_what_is_damaged_is_refused_and_named(small, damage, said):
    damage(small)
    with pytest.raises(BundleError, match=said):
        Bundle.open(small)


def test_manifest_of_an_older_jetdraft_has_no_new_fields(small):
    """What a new version adds has a default, so that older bundles stay readable."""
    bundle, manifest = Bundle.open(small), read_manifest(small)
    del manifest["start_token_ids"]
    for graph in manifest["graphs"].values():
        del graph["encoder_file"], graph["contract"]["relative_positions"]
    write_manifest(small, manifest)
    assert Bundle.open(small) == bundle


@pytest.mark.parametrize("field", ["vocab_size", "capacity"])
def test_pair_that_does_not_match_is_refused(small, field):
    manifest = read_manifest(small)
    manifest["graphs"]["drafter"]["contract"][field] += 1
    write_manifest(small, manifest)
    with pytest.raises(PairError, match=r"drafter('s capacity| chooses among)"):
        Bundle.open(small)


def test_pair_may_differ_in_everything_else():
    drafter = replace(CONTRACT, kv_shapes=((2, 8),), max_width=4)
    check_pair(CONTRACT, drafter)
    check_pair(CONTRACT, replace(drafter, vocab_size=CONTRACT.vocab_size - 1))


def zipped(ids: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, ids=ids)
    return buffer.getvalue()


def make_with_head(folder, ids=IDS, head=HEAD, **fields):
    folder.mkdir()
    (folder / "target.onnx").write_text("made")
    write_graph(folder / "drafter.onnx", HEAD, GUESSES)
    if isinstance(ids, bytes):
        (folder / "drafter-vocabulary.npy").write_bytes(ids)
    else:
        np.save(folder / "drafter-vocabulary.npy", ids)
    vocabulary = {"vocabulary_file": "drafter-vocabulary.npy", **fields}
    two = {
        "target": GraphEntry("target.onnx", TARGET, {}, "here", 1),
        "drafter": GraphEntry("drafter.onnx", head, {}, "here", 1, **vocabulary),
    }
    Bundle(path=folder, graphs=two, eos_token_ids=(0,), provider="cpu", tools={}).save()
    return folder


def test_a_head_and_its_vocabulary_survive_the_bundle(tmp_path):
    opened = Bundle.open(make_with_head(tmp_path / "bundle"))
    assert opened.target.contract == TARGET
    assert opened.drafter.contract == HEAD
    assert "drafter-vocabulary.npy" in opened.drafter.files
    np.testing.assert_array_equal(opened.draft_vocabulary(), IDS)
    assert opened.draft_vocabulary("target") is None


MISFIT = f"{len(IDS)} different token ids below {VOCABULARY} as int64"
MISFITS = (
    *(IDS[:-1], IDS + 1, IDS - 2, IDS.astype(np.int32), IDS.astype(np.float64)),
    *(np.array([*IDS[:-1], IDS[0]]), IDS[None], np.array(3)),
    *(b"not an array", b"", zipped(IDS)),
)


@cases(
    "said, made",
    *((MISFIT, {"ids": ids}) for ids in MISFITS),
    ("its file come together", {"vocabulary_file": None}),
    ("its file come together", {"head": replace(HEAD, draft_vocab=0)}),
    ids=lambda made: str(made)[:40],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, said, made):
    folder = make_with_head(tmp_path / "bundle", **made)
    with pytest.raises(BundleError, match=said):
        Bundle.open(folder)


def test_a_head_of_other_features_is_refused(tmp_path):
    head = replace(HEAD, feature_input=7)
    with pytest.raises(PairError, match="reads features of width 7, the target gives"):
        Bundle.open(make_with_head(tmp_path / "bundle", head=head))
    with pytest.raises(PairError, match="gives width 0; export both together"):
        check_pair(replace(TARGET, feature_size=0), HEAD)


def test_an_entry_stores_where_it_is_cut():
    contract = replace(CONTRACT, kv_shapes=((1, 16),) * 3)
    entry = GraphEntry("a.onnx", contract, {}, "here", 1, halves=HALVES)
    read = parsing.read_record(GraphEntry, json.loads(json.dumps(asdict(entry))))
    assert read == entry
    assert len(read.split_contract.upper.kv_shapes) == 1
    assert set(HALVES.files) < set(read.files)
    assert not read.split_contract.scores


def test_a_graph_that_earlier_versions_wrote_is_ignored():
    """Halves had a graph `exit`, which left the upper layers out."""
    before = {**asdict(HALVES), "exit": "e.onnx", "base": "0a"}
    assert parsing.read_record(Halves, before).files == HALVES.files


def test_a_cut_outside_the_layers_is_refused():
    entry = GraphEntry("a.onnx", CONTRACT, {}, "here", 1, halves=HALVES)
    with pytest.raises(ContractError, match="1 layers cannot be cut below the top 1"):
        entry.check()


def test_files_are_hashed_once_and_again_when_they_change(small, monkeypatch):
    hashed, original = [], manifest.sha256_of
    monkeypatch.setattr(
        manifest, "sha256_of", lambda file: hashed.append(file.name) or original(file)
    )
    names = set(Bundle.open(small).files)
    hashed.clear()
    Bundle.open(small)
    assert hashed == []
    Bundle.open(small, again=True)
    assert set(hashed) == names
    hashed.clear()
    file = small / "target.onnx"
    content = file.read_bytes()
    file.write_bytes(content)
    Bundle.open(small)
    assert hashed == ["target.onnx"], "it was written again"
    status = file.stat()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(BundleError, match="was altered"):
        Bundle.open(small)


@pytest.mark.parametrize("stamps", ["", "[1]", "5", '{"target.onnx": 7}'])
def test_damaged_stamps_count_for_nothing(small, stamps):
    Bundle.open(small)
    (small / manifest.CHECKED_FILES).write_text(stamps)
    alter(small)
    with pytest.raises(BundleError, match="was altered"):
        Bundle.open(small)


def test_a_folder_without_room_for_stamps(small):
    Bundle.open(small)
    shutil.rmtree(small / "profiles")
    (small / "profiles").write_text("in the place of the folder")
    assert Bundle.open(small).files


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
        monkeypatch.setattr(manifest, "_exchange_folders", lambda one, other: False)
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


@cases(
    "place, said",
    ("", "is not a bundle"),
    ("file", "is not a bundle"),
    ("file/b", "cannot write"),
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
        manifest.check_output(tmp_path / "new" / ("x" * 240))
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_noticed_first(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(OutputError, match=r"File too large.*free some space"):
            manifest.check_output(tmp_path / "new" / "bundle")
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
        "from jetdraft.manifest import writing\n"
        "model = jetdraft.load(sys.argv[1])\n"
        "assert model.generate('The robot', max_new_tokens=3).token_ids\n"
        "try:\n"
        "    with writing(sys.argv[2]):\n"
        "        pass\n"
        "except jetdraft.OutputError as error:\n"
        "    print(error)\n"
    )
    folders = [str(testing.toy_bundle(tmp_path / "toy")), str(tmp_path / "new")]
    assert "no file locks; use jetdraft on Linux" in python(code, *folders)
    assert not (tmp_path / "new").exists()
