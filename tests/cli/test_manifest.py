"""jetdraft check --no-run: what a bundle holds."""

from __future__ import annotations

import json
import os

from jetdraft.bundle import MANIFEST, Bundle
from jetdraft.runtime.planning.registry import methods_of
from tests.cli.running import assert_refused, jetdraft


def test_shows_graphs_shapes_quantization_and_bytes(bundle):
    result = jetdraft("check", "--no-run", bundle)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    opened = Bundle.open(bundle)
    for expected in (
        f"bundle {bundle} (sha256 {opened.sha256[:12]})",
        f"methods {', '.join(methods_of(opened))}",
        "provider cpu",
        "vocabulary 288, end of text 0",
        "capacity 256 tokens, 64 rows",
        "quantization int8-rtn-b32; floats are float32",
        "layers 3, KV heads 2 x 16",
        "layers 1, KV heads 1 x 16",
        "input_ids int64 1 x n",
        "answer_rows int64 m",
        "past_key.0 float32 1 x 2 x 257 x 16",
        "past_key.0 float32 1 x 1 x 256 x 16",
        "candidates int64 1 x m x 64",
        "logits float32 1 x m x 288",
        # 3 layers of keys and values of 2 x 256 x 16 floats.
        "KV buffers 0.2 MB",
    ):
        assert expected in lines, expected
    for name, file in opened.files.items():
        assert f"{name} {file['bytes']:,} {file['sha256'][:12]}" in lines


def test_json_is_the_manifest(bundle):
    result = jetdraft("check", "--no-run", bundle, "--json")
    assert json.loads(result.stdout) == json.loads((bundle / MANIFEST).read_text())


def test_bundle_without_drafter_shows_one_graph(lone_bundle):
    result = jetdraft("check", "--no-run", lone_bundle)
    assert result.exit_code == 0
    assert "drafter" not in result.stdout


def test_what_is_no_bundle_is_refused(tmp_path):
    assert_refused(jetdraft("check", "--no-run", tmp_path / "nothing"), "no bundle at")
    assert_refused(jetdraft("check", "--no-run", tmp_path), "has no bundle.json")


def test_damaged_bundle_is_refused(copied_bundle):
    os.truncate(copied_bundle / "target.onnx", 10)
    assert_refused(
        jetdraft("check", "--no-run", copied_bundle), "has 10 bytes instead of"
    )
