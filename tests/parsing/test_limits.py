import copy
import json
import os
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import jetdraft
from jetdraft import Bundle, Conversation, files
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.refusals import LAYER_COUNT_FIELDS
from jetdraft.cli import main
from jetdraft.cli.check import describe_bundle
from jetdraft.errors import (
    BundleError,
    CheckpointError,
    DataError,
    JetdraftError,
    OptionError,
    OutputError,
    StoreError,
    printable,
)
from jetdraft.files import read_arrays
from jetdraft.manifest import SEAL, seal_hash
from jetdraft.methods.recall.method import adapt_response
from jetdraft.parsing import JsonError, one_of, read_json
from jetdraft.runtime.history.store import Entry, ResponseStore
from jetdraft.runtime.passes.graph import MAX_WIDE_BINDINGS
from jetdraft.runtime.passes.prefix import digest_of
from jetdraft.testing import toy_bundle
from tests import cases, edit_json, read_manifest, write_manifest
from tests.programs import assert_refused
from tests.programs import jetdraft as run
from tests.tiny import drafter_config, save_checkpoint

PROMPT = "The robot sees"


def test_a_rule_is_its_words_in_a_signature():
    assert repr(one_of("a", "b")) == "Rule(words='one of a, b')"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64, np.uint8])
def test_a_seed_may_be_one_of_numpy_s(toy_model, kind):
    options = {"temperature": 1.0, "max_new_tokens": 8}
    expected = toy_model.generate(PROMPT, seed=7, **options)
    result = toy_model.generate(PROMPT, seed=kind(7), **options)
    assert result.token_ids == expected.token_ids
    assert type(result.stats.seed) is int


def wide(graph):
    bindings = {**graph._bindings, **graph._wide_bindings}
    return [size for size in bindings if size.width > 16]


@pytest.mark.parametrize("method", ["draft", "cascade"])
def test_bindings_of_prompts_of_all_lengths_are_bounded(toy_model, method):
    ids = (toy_model.prompt(PROMPT * 40).tolist())[:200]
    drafter = toy_model.parts.drafter
    for length in range(2, 66):
        toy_model.forget()
        options = {"method": method, "num_draft_tokens": 3, "max_new_tokens": 2}
        toy_model.generate(token_ids=ids[:length], **options)
        assert len(wide(drafter)) <= MAX_WIDE_BINDINGS
        assert len(wide(toy_model.parts.target)) <= MAX_WIDE_BINDINGS
    assert {size.answers for size in wide(drafter)} == {1}, "logits of whole prompts"


def test_the_same_text_after_a_binding_was_dropped(toy_model):
    ids = (toy_model.prompt(PROMPT * 40).tolist())[:200]
    options = {"method": "draft", "num_draft_tokens": 3, "max_new_tokens": 8}
    plain = {"method": "none", "max_new_tokens": 8}
    for length in (40, *range(20, 64), 40):
        toy_model.forget()
        drafted = toy_model.generate(token_ids=ids[:length], **options)
        toy_model.forget()
        expected = toy_model.generate(token_ids=ids[:length], **plain)
        assert drafted.token_ids == expected.token_ids


@pytest.mark.parametrize("arguments", [["check", "--no-run"], ["generate", "-p", "x"]])
def test_a_full_device_as_output_is_one_line(toy_model, arguments):
    (verb, *options), folder = arguments, str(toy_model.bundle.path)
    command = [sys.executable, "-m", "jetdraft", verb, folder, *options]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: the disk is full; free some space"
    assert "Traceback" not in ended.stderr
    assert "ignored" not in ended.stderr


def test_names_in_errors_cannot_steer_the_terminal(tmp_path):
    result = CliRunner().invoke(main, ["check", str(tmp_path / "a\x1b[2J\u202eb")])
    assert_refused(result, "a\\x1b[2J\\u202eb")


def test_nested_json_is_refused_everywhere(toy_model, tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    with pytest.raises(OptionError, match="nested deeper"):
        Conversation(toy_model).load(file)
    assert_refused(
        CliRunner().invoke(main, ["plan", str(file), "--device", "orin-nano-4gb"]),
        "nested deeper",
    )


def test_reads_what_json_can_hold():
    text = '{"a": [1, -2.5, true, null, "x]}[{"], "é": {"b\\\\": "\\ud83d\\ude00"}}'
    value = {"a": [1, -2.5, True, None, "x]}[{"], "é": {"b\\": "😀"}}
    for data in (text, text.encode(), bytearray(text.encode())):
        assert read_json(data) == value
    assert read_json("18446744073709551615") == 2**64 - 1
    assert read_json("-9223372036854775808") == -(2**63)
    assert read_json(f"[{10**3999}]", exact=True) == [10**3999]
    # Brackets in texts are no depth.
    assert read_json('["' + "[{" * 1000 + '\\"[[["]') == ["[{" * 1000 + '"[[[']


DEEP = ["[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65, "[" * 500_000]
DEEP += ['"\\""' + "[" * 65]


@cases(
    "data, why",
    *((data, "no valid JSON") for data in ("", "[1,]", '{"a": "x', "\ufeff{}")),
    ("[NaN]", "NaN"),
    ("[-Infinity]", "Infinity"),
    *((f"[{number}]", "too large") for number in ("1e999", "-1e999")),
    *((str(number), "64 bits") for number in (2**64, -(2**63) - 1)),
    ("9" * 100_000, "64 bits"),
    ('"\\ud800"', "surrogate"),
    ('["\\uDFFF\\ud83d"]', "surrogate"),
    ('{"\\ud800": 1}', "surrogate"),
    *((text, "UTF-8") for text in ('"\ud800"', b'"\xff"')),
    ('{"a": 1, "a": 2}', "twice"),
    *((text, "deeper than 64") for text in DEEP),
    (b"1" + b" " * 1_000_000, "bytes"),
    ('"' + "é" * 600_000 + '"', "bytes"),
)
def test_refuses_the_rest(data, why):
    with pytest.raises(JsonError, match=why) as refused:
        read_json(data)
    message = str(refused.value)
    assert len(message) < 120
    assert message.isprintable()


def test_limits_are_the_callers():
    assert read_json("[[1]]", most_depth=2) == [[1]]
    with pytest.raises(JsonError, match="deeper than 1"):
        read_json("[[1]]", most_depth=1)
    assert read_json("[1]", most_bytes=3) == [1]
    with pytest.raises(JsonError, match="more than 2 bytes"):
        read_json("[1]", most_bytes=2)
    with pytest.raises(JsonError, match="integer has 100000 digits"):
        read_json("9" * 100_000, exact=True)
    with pytest.raises(JsonError, match="nested too deeply"):
        read_json("[" * 200_000, most_depth=10**6)


def test_takes_time_in_proportion():
    texts = ['"' + "\\" * 999_998, '["' * 333_333, "[]," * 333_333, '"\\"' * 333_333]
    start = time.monotonic()
    for text in texts:
        with pytest.raises(JsonError):
            read_json(text)
    assert time.monotonic() - start < 10


@cases(
    "text, shown",
    ("plain, é, 字", "plain, é, 字"),
    ("a\x1b[2Jb\n\t\x7f\x9b", "a\\x1b[2Jb\\n\\t\\x7f\\x9b"),
    ("\u202eevil\u2066\u200b", "\\u202eevil\\u2066\\u200b"),
    ("\ud800", "\\ud800"),
    ("\u2028x", "\\u2028x"),
    (ValueError("no\nway"), "no\\nway"),
    (None, "None"),
)
def test_shows_what_would_steer_the_terminal(text, shown):
    assert printable(text) == shown
    printable(text).encode("utf-8")


def test_shortens():
    assert printable("a" * 200) == "a" * 200
    assert printable("a" * 201) == "a" * 199 + "…"
    assert printable("abc\n\n", 5) == "abc\\…"
    assert len(printable("\n" * 10**6, 30)) == 30


EVIL = """
import pathlib
pathlib.Path({mark!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class EvilConfig(PretrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "whole"
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    config = drafter_config(**sizes, eos_token_id=2)
    return save_checkpoint(folder, config, tokenizer=False)


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkpoint")


def load(folder):
    return Checkpoint.load(str(folder), torch.float32)


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_a_checkpoint_s_code_does_not_run_whatever_the_terminal_says(
    folder, tmp_path, part
):
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    if part == "config":
        edit_json(
            folder / "config.json",
            model_type="evil",
            auto_map={"AutoConfig": "evil.EvilConfig"},
        )
    else:
        classes = {"AutoTokenizer": [None, "evil.EvilTokenizer"]}
        tokenizer = {"tokenizer_class": "EvilTokenizer", "auto_map": classes}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    command = ("export", folder, "-o", tmp_path / "bundle", "--quantize", "none")
    ended = run(*command, stdin="y\n" * 50)
    assert not mark.exists()
    assert ended.exit_code == 2, ended.output
    assert ended.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in ended.stderr


class Call:
    def __reduce__(self):
        return print, ("ran",)


@cases("content", b"", b"\x80\x02garbage", b"PK\x03\x04", pickle.dumps(Call()))
def test_a_damaged_pickle_is_one_line(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot load|are damaged") as refused:
        load(folder)
    assert str(refused.value).isprintable()


@cases(
    "changes",
    {"hidden_size": "16"},
    {"num_attention_heads": None},
    {"num_hidden_layers": [1]},
    {"vocab_size": {}},
    {"rms_norm_eps": "small"},
    {"rope_parameters": 5},
    {"model_type": 5},
    {"quantization_config": 5},
    {"eos_token_id": "x"},
    {"eos_token_id": [[1]]},
    {"architectures": 5},
)
def test_a_config_of_wrong_types_is_one_line(folder, changes):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", **changes)
    try:
        load(folder)
    except CheckpointError as error:
        assert str(error).isprintable()  # noqa: PT017
    else:
        assert "architectures" in changes, "transformers does not need it"


@cases(
    "changes, said",
    ({"num_hidden_layers": 1_000_000}, "has num_hidden_layers 1000000"),
    ({"num_hidden_layers": 10**15}, "at most 10000 layers"),
    ({"num_hidden_layers": 10_000}, "a larger model than its files hold"),
    ({"vocab_size": 10**9}, "a larger model than its files hold"),
    ({"hidden_size": 10**6}, "a larger model than its files hold"),
    ({"intermediate_size": 10**12}, "a larger model than its files hold"),
    ({"head_dim": 10**10}, "a larger model than its files hold"),
    *(
        ({"text_config": {name: 10**9}}, f"has {name} 1000000000, and at most")
        for name in sorted(LAYER_COUNT_FIELDS)
    ),
)
def test_what_a_config_asks_for_beyond_its_files_is_not_built(folder, changes, said):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_a_number_that_counts_no_layers_is_not_bounded(folder):
    """As Gemma 3n and Gemma 4 have it."""
    edit_json(
        folder / "config.json",
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=10**5,
    )
    assert load(folder).vocab_size == 32


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="is a pipe or a device"):
        load(folder)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "a\ud800b"])
def test_a_name_that_no_checkpoint_can_have_is_one_line(name):
    with pytest.raises(CheckpointError) as refused:
        load(name)
    assert str(refused.value).isprintable()


def test_an_end_of_text_that_cannot_occur_is_left_out(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", eos_token_id=[-1, 2, 99])
    assert load(folder).eos_token_ids == (2,)


@pytest.fixture
def own_toy(tmp_path):
    return toy_bundle(tmp_path / "toy")


WRONG = [
    *(None, True, 0, -1, 1, 0.5, 2**31, 2**32, 2**63, 1e300, "", "x", "../x"),
    *("float3a", "\x1b[2J\u202e", [], [[]], [None], [-1], [2**31], {}, {"": None}),
]


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
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
    manifest, opened, messages = read_manifest(own_toy), 0, []
    paths = list(places(manifest))
    assert len(paths) > 60
    for path in paths:
        for value in WRONG:
            write_manifest(own_toy, changed(manifest, path, value))
            try:
                describe_bundle(Bundle.open(own_toy)).encode()
                opened += 1
            except jetdraft.JetdraftError as error:
                messages.append(str(error))
    assert len(messages) > 10 * opened > 0
    assert all(len(text) < 500 and text.isprintable() for text in messages)


def test_a_name_that_steers_the_terminal_is_shown_as_text(own_toy):
    manifest = read_manifest(own_toy)
    path = ("graphs", "target", "source")
    write_manifest(own_toy, changed(manifest, path, "a\x1b[2J\nmade with love"))
    shown = CliRunner().invoke(main, ["check", "--no-run", str(own_toy)])
    assert shown.exit_code == 0
    assert "from a\\x1b[2J\\nmade with love\n" in shown.stdout
    write_manifest(own_toy, changed(manifest, path, "\ud800"))
    result = CliRunner().invoke(main, ["check", "--no-run", str(own_toy)])
    assert_refused(result, "is damaged")


KEPT = "The robot sees"
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
        expected = first.generate(KEPT, **GREEDY).token_ids
    [file] = (own_toy / "profiles").glob("cpu-1.json")
    good = json.loads(file.read_text())
    texts = {"nested": "[" * 100_000, "no seal": json.dumps({**good, SEAL: "x"})}
    widths = {**good["widths"], "base": None}
    texts["another class"] = json.dumps({**good, "widths": widths})
    for name, change in wrong_profiles(good).items():
        fields = {**good, **change}
        texts[name] = json.dumps({**fields, SEAL: seal_hash(fields)})
    for name, text in texts.items():
        file.write_text(text)
        with jetdraft.load(own_toy, threads=1) as again:
            assert again.parts.profiles.read_survey() is None, name
            assert again.generate(KEPT, **GREEDY).token_ids == expected
            assert again.parts.profiles.read_survey() is not None, name


def damaged(content, chance):
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 8))):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return flipped


def test_a_damaged_npz_is_refused_whatever_the_damage(tmp_path):
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
    toy_model.save_prefix(file, toy_model.prompt(KEPT * 3))
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
    assert toy_model.generate(KEPT, **GREEDY).stats.reused_tokens == 0


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_names_that_no_file_can_have(toy_model, own_toy, tmp_path, name):
    file = tmp_path / name
    with pytest.raises(OutputError, match="no file can have this name"):
        toy_model.save_prefix(file, toy_model.prompt(KEPT))
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


@cases(
    "make, said",
    (os.mkfifo, "it is a pipe or a device"),
    (lambda path: path.symlink_to(path.name), "it is a link to itself"),
    ids=["pipe", "loop"],
)
def test_a_place_that_cannot_be_written_stays(toy_model, tmp_path, make, said):
    """A device would be replaced as well, which only root can make."""
    make(path := tmp_path / "place")
    before = path.lstat()
    with pytest.raises(OutputError, match=said):
        toy_model.save_prefix(path, toy_model.prompt(KEPT))
    assert path.lstat() == before


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
