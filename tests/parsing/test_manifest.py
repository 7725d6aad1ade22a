"""A manifest with any wrong field is one line, never a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

import jetdraft
from jetdraft.bundle import Bundle
from jetdraft.cli import main
from jetdraft.cli.check import describe_bundle
from jetdraft.errors import BundleError
from jetdraft.manifest import MANIFEST
from tests import manifests
from tests.cli.running import assert_refused

WRONG = [
    *(None, True, 0, -1, 1, 0.5, 2**31, 2**32, 2**63, 1e300, "", "x", "../x"),
    *("float3a", "\x1b[2J\u202e", [], [[]], [None], [-1], [2**31], {}, {"": None}),
]


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all fields, containers too; of a list the first item."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, field in value.items():
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
    assert len(paths) > 100
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


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("graphs.target.contract.max_width", 0, "max_width must be 1 to"),
        ("graphs.target.contract.max_width", -2, "max_width must be 1 to"),
        ("graphs.target.contract.capacity", 2**40, "capacity must be 1 to"),
        ("graphs.target.contract.dtype", "float3a", "dtype must be one of float32"),
        ("graphs.target.contract.kv_shapes", [[2, -16]], r"kv_shapes\[0\]\[1\] must"),
        ("graphs.target.streams", 5, "streams must be an object"),
        ("graphs.target.quantization", {"raised": 5}, "raised must be a list"),
        ("eos_token_ids", [-1], r"eos_token_ids\[0\] must be 0 to"),
        ("eos_token_ids", [2**32], r"eos_token_ids\[0\] must be 0 to"),
        ("files.target.onnx.bytes", 1.5, "must be an integer, not 1.5"),
        ("provider", "../../x", "provider must be a provider's name"),
    ],
)
def test_says_which_field_is_wrong(own_toy, path, value, why):
    keys = tuple(path.replace("target.onnx", "target%onnx").split("."))
    keys = tuple(key.replace("%", ".") for key in keys)
    manifests.write(own_toy, changed(manifests.read(own_toy), keys, value))
    with pytest.raises(BundleError, match=f"malformed.*{why}"):
        Bundle.open(own_toy)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"schema_version": Infinity}', "9" * 5000]
)
def test_json_beyond_the_limits_is_damaged(own_toy, text):
    (own_toy / MANIFEST).write_text(text)
    with pytest.raises(BundleError, match="is damaged"):
        Bundle.open(own_toy)


def test_an_edit_is_noticed(own_toy):
    """The hashes of files cover neither the contract nor the ends of text."""
    manifest = manifests.read(own_toy)
    manifest["eos_token_ids"].append(5)
    (own_toy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"bundle.json was altered"):
        Bundle.open(own_toy)


def test_another_contract_is_another_bundle(own_toy, tmp_path):
    other = shutil.copytree(own_toy, tmp_path / "other")
    manifests.edit(other, eos_token_ids=[0])
    assert Bundle.open(own_toy).sha256 != Bundle.open(other).sha256


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
