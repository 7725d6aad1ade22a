"""Damaged manifests and files beside a bundle: one line or no effect."""

import copy
import json
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import jetdraft
from jetdraft import files
from jetdraft.bundle import Bundle
from jetdraft.cli import main
from jetdraft.cli.check import describe_bundle
from jetdraft.errors import (
    BundleError,
    DataError,
    JetdraftError,
    OutputError,
    StoreError,
)
from jetdraft.files import read_arrays
from jetdraft.manifest import SEAL, seal_hash
from jetdraft.methods.recall.method import adapt_response
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.passes.prefix import digest_of
from jetdraft.testing import toy_bundle
from tests import manifests
from tests.programs import assert_refused


@pytest.fixture
def own_toy(tmp_path):
    return toy_bundle(tmp_path / "toy")


WRONG = [
    *(None, True, 0, -1, 1, 0.5, 2**31, 2**32, 2**63, 1e300, "", "x", "../x"),
    *("float3a", "\x1b[2J\u202e", [], [[]], [None], [-1], [2**31], {}, {"": None}),
]


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all fields, containers too; of lists, graphs and files the first."""
    if path:
        yield path
    if isinstance(value, dict):
        alike = path in (("graphs",), ("files",))
        for key, field in [*value.items()][: 1 if alike else None]:
            yield from places(field, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(manifest: dict, path: tuple, value: object) -> dict:
    other = copy.deepcopy(manifest)
    owner = other
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return other


def test_any_wrong_field_is_refused_or_harmless(own_toy):
    manifest, opened, messages = manifests.read(own_toy), 0, []
    paths = list(places(manifest))
    assert len(paths) > 60
    for path in paths:
        for value in WRONG:
            manifests.write(own_toy, changed(manifest, path, value))
            try:
                describe_bundle(Bundle.open(own_toy)).encode()
                opened += 1
            except jetdraft.JetdraftError as error:
                messages.append(str(error))
    assert len(messages) > 10 * opened > 0
    assert all(len(text) < 500 and text.isprintable() for text in messages)


def test_a_name_that_steers_the_terminal_is_shown_as_text(own_toy):
    manifest = manifests.read(own_toy)
    path = ("graphs", "target", "source")
    manifests.write(own_toy, changed(manifest, path, "a\x1b[2J\nmade with love"))
    shown = CliRunner().invoke(main, ["check", "--no-run", str(own_toy)])
    assert shown.exit_code == 0
    assert "from a\\x1b[2J\\nmade with love\n" in shown.stdout
    manifests.write(own_toy, changed(manifest, path, "\ud800"))
    result = CliRunner().invoke(main, ["check", "--no-run", str(own_toy)])
    assert_refused(result, "is damaged")


PROMPT = "The robot sees"
GREEDY = {"max_new_tokens": 8, "method": "none"}


def wrong_profiles(fields):
    widths, curve = fields["widths"], fields["curve"]
    return {
        "no classes": {"widths": {**widths, "classes": [], "gaps": {}}},
        "an empty class": {"widths": {**widths, "classes": [[], *widths["classes"]]}},
        "width 0": {"widths": {**widths, "classes": [[0]], "gaps": {"0": 0.0}}},
        "width 99": {"widths": {**widths, "classes": [[99]], "gaps": {"99": 0.0}}},
        "zero times": {"curve": {**curve, "passes": {"1": 0.0, "2": 0.0}}},
        "infinity": {"curve": {**curve, "probe": float("inf")}},
        "text": {"curve": {**curve, "drafter": "1"}},
        "a number as widths": {"widths": 5},
    }


def test_a_profile_that_cannot_be_used_is_measured_again(own_toy):
    with jetdraft.load(own_toy, threads=1) as first:
        expected = first.generate(PROMPT, **GREEDY).token_ids
    [file] = (own_toy / "profiles").glob("cpu-1.json")
    good = json.loads(file.read_text())
    texts = {"nested": "[" * 100_000, "no seal": json.dumps({**good, SEAL: "x"})}
    texts["another class"] = json.dumps(
        {**good, "widths": {**good["widths"], "base": None}}
    )
    for name, change in wrong_profiles(good).items():
        fields = {**good, **change}
        texts[name] = json.dumps({**fields, SEAL: seal_hash(fields)})
    for name, text in texts.items():
        file.write_text(text)
        with jetdraft.load(own_toy, threads=1) as again:
            assert again.parts.profiles.read_survey() is None, name
            assert again.generate(PROMPT, **GREEDY).token_ids == expected
            assert again.parts.profiles.read_survey() is not None, name


def damaged(content, chance):
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return flipped


def test_a_damaged_npz_is_refused_whatever_the_damage(tmp_path):
    """Among them encrypted entries, unknown compressions and huge shapes."""
    file, chance = tmp_path / "some.npz", random.Random(3)
    np.savez(file, a=np.arange(4), b=np.array("text"), c=np.zeros((2, 3), np.float32))
    content, refused = file.read_bytes(), 0
    for _ in range(1500):
        file.write_bytes(damaged(content, chance))
        try:
            read_arrays(file, StoreError("refused"))
        except StoreError:
            refused += 1
    assert refused > 500


def test_arrays_that_unfold_to_more_than_the_file_are_refused(tmp_path):
    file = tmp_path / "bomb.npz"
    np.savez_compressed(file, a=np.zeros(10_000_000))
    with pytest.raises(StoreError, match="refused"):
        read_arrays(file, StoreError("refused"))


@pytest.fixture
def prefix(toy_model, tmp_path):
    file = tmp_path / "prefix.npz"
    toy_model.save_prefix(file, toy_model.prompt(PROMPT * 3))
    with np.load(file) as stored:
        return file, dict(stored)


def test_a_prefix_with_other_rows_is_refused(toy_model, prefix):
    """With the right identity they would have passed as this machine's own."""
    file, arrays = prefix
    name = next(name for name in arrays if name.startswith("target/"))
    for value in (0.0, float("nan")):
        np.savez(file, **{**arrays, name: np.full_like(arrays[name], value)})
        with pytest.raises(BundleError, match="is not a saved prefix"):
            toy_model.load_prefix(file)
    np.savez(file, **arrays)
    toy_model.load_prefix(file)


def test_a_prefix_of_odd_form_is_refused(toy_model, prefix):
    """Somebody knows the hash, too."""
    file, arrays = prefix
    long = {
        name: np.zeros((*array.shape[:2], 3000, array.shape[3]), array.dtype)
        for name, array in arrays.items()
        if "/" in name
    }
    for change in (
        {"tokens": np.array(["a"] * len(arrays["tokens"]))},
        {"tokens": np.array(5)},
        {"tokens": arrays["tokens"].astype(np.float64)},
        {"tokens": arrays["tokens"][None]},
        {"tokens": np.zeros(3000, np.int64), **long},
        {"identity": np.array("[" * 100_000)},
        {"identity": np.array("5")},
        {
            name: array.astype(np.float64)
            for name, array in arrays.items()
            if "/" in name
        },
    ):
        changed = {**arrays, **change}
        np.savez(file, **{**changed, "sha256": np.array(digest_of(changed))})
        with pytest.raises(BundleError):
            toy_model.load_prefix(file)
    assert toy_model.generate(PROMPT, **GREEDY).stats.reused_tokens == 0


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_file_can_have(toy_model, own_toy, tmp_path, name):
    file = tmp_path / name
    with pytest.raises(OutputError, match="no file can have this name"):
        toy_model.save_prefix(file, toy_model.prompt(PROMPT))
    for kind, use in (
        (StoreError, lambda: jetdraft.load(own_toy, threads=1, store=file)),
        (StoreError, lambda: jetdraft.load(own_toy, threads=1, learn=file)),
        (OutputError, lambda: toy_bundle(file)),
    ):
        with pytest.raises(kind, match="no file can have this name") as refused:
            use()
        assert str(refused.value).isprintable()
    with pytest.raises(JetdraftError):
        toy_model.load_prefix(file)


def test_a_pipe_stays_a_pipe(toy_model, tmp_path):
    """A device would be replaced as well, which only root can make."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="it is a pipe or a device"):
        toy_model.save_prefix(tmp_path / "pipe", toy_model.prompt(PROMPT))
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_to_itself_is_refused(toy_model, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="it is a link to itself"):
        toy_model.save_prefix(tmp_path / "loop", toy_model.prompt(PROMPT))


def test_a_bundle_that_cannot_be_looked_at_is_refused():
    """The system refuses the name, as it does below a folder of another user."""
    with pytest.raises(BundleError, match=r"cannot read .*File name too long"):
        jetdraft.load("a" * 5000)


@pytest.mark.parametrize("used", ["text", b"\xff", 1e300, float("inf"), -1.0])
def test_poisoned_times_do_not_end_the_list(own_toy, tmp_path, used):
    file = tmp_path / "store.sqlite"
    bundle = jetdraft.Bundle.open(own_toy)
    store = ResponseStore(file, bundle.tokenizer_sha256)
    store.add(Entry([40, 41], [42], np.zeros(0, np.float32)))
    blob = np.array([50], np.uint32).tobytes()
    with sqlite3.connect(file) as database:
        database.executemany(
            "insert into entries (user, used, prompt, response, vector)"
            " values ('', ?, ?, ?, ?)",
            [(used, blob, blob, b"")] * 300,
        )
    listed = CliRunner().invoke(main, ["store", "list", str(own_toy), str(file)])
    assert listed.exit_code == 0, listed.exception
    assert listed.stdout.count("->") == 1
    assert len(ResponseStore(file, bundle.tokenizer_sha256).entries) == 1


def test_listed_texts_cannot_steer_the_terminal(own_toy, tmp_path, toy_model):
    file = tmp_path / "store.sqlite"
    store = ResponseStore(file, jetdraft.Bundle.open(own_toy).tokenizer_sha256)
    ids = toy_model.prompt("a\x1b[2Jb").tolist()
    store.add(Entry(ids, ids, np.zeros(0, np.float32)))
    listed = CliRunner().invoke(main, ["store", "list", str(own_toy), str(file)])
    assert "\x1b" not in listed.stdout
    assert "a\\x1b[2Jb" in listed.stdout


def test_recall_of_repeated_tokens_takes_no_seconds():
    start = time.monotonic()
    for kind in ([7], [7, 8], list(range(7))):
        one, other = (kind * 1900)[:1900], (kind * 1900)[:1800]
        adapt_response([1, *one, 2], [7] * 1000, [3, *other, 4])
    one = [token for step in range(4000) for token in (step, 10_000 + step % 3)]
    other = [token for step in range(4000) for token in (step, 20_000 + step)]
    adapt_response(one, one, other)
    assert time.monotonic() - start < 1


def test_an_adapted_response_does_not_grow_without_end():
    prompt, other = [], []
    for step in range(40):
        prompt += [1000 + step, step]
        other += [1000 + step, *[step + 1] * 32]
    assert len(adapt_response(prompt, [0] * 8, other)) < 1_000_000


def test_a_device_that_never_ends_is_no_data(monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(DataError, match="/dev/zero does not end; give a file"):
        files.read_text(Path("/dev/zero"))
