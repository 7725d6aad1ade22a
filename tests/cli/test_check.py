import json

import pytest

from jetdraft.bundle import MANIFEST, Bundle
from jetdraft.cli import check
from jetdraft.cli.check import Comparison
from jetdraft.runtime.measured.widths import Widths
from jetdraft.runtime.planning.registry import methods_of
from tests.programs import jetdraft, succeed


@pytest.fixture(scope="module")
def report(bundle) -> list[str]:
    return succeed("check", bundle, "--threads", "1").stdout.splitlines()


def test_says_that_files_contracts_widths_and_texts_are_right(report):
    assert report[0] == "files      10 present, hashes right"
    assert report[1] == "contract   2 graphs as declared"
    shown = [line.split() for line in report if line.startswith("widths")]
    assert ["widths", "1..16", "exact"] in shown
    # Four methods at four lengths, three trees and auto, in three settings.
    texts = [line for line in report if line.startswith("text")]
    assert len(texts) == 60
    assert all(line.endswith(" same 96 tokens") for line in texts)
    # The longest name is stream tree=best,prune_threshold=0.05.
    assert len({line.index(" same ") for line in texts}) == 1
    shown = {" ".join(line.split()) for line in texts}
    for way in ("draft 1 greedy", "lookup 4 greedy", "auto temperature=0.8 seed=1"):
        assert f"text {way} same 96 tokens" in shown
    assert "text draft tree=heap temperature=0.8 seed=1 same 96 tokens" in shown
    assert report[-1] == "verdict    pass: 60 texts as by plain decoding"


def test_another_class_of_widths_does_not_look_like_a_fault():
    widths = Widths([[1], [2, 3, 4]], {1: 0.078, 2: 0.0, 3: 0.0, 4: 0.0})
    other, exact = check._width_lines(widths)
    assert other.split()[:5] == ["1", "left", "out", "when", "exact:"]
    assert other.endswith("7.8e-02")
    assert exact.split() == ["2..4", "exact"]


def test_another_text_is_an_error(bundle, monkeypatch):
    differing = Comparison("draft", 2, {}, tokens=9, first_difference=4)
    monkeypatch.setattr(check, "compare_methods", lambda model: iter([differing]))
    result = jetdraft("check", bundle, "--threads", "1")
    assert result.exit_code == 2
    assert "differs at token 4" in result.stdout
    assert "verdict" not in result.stdout
    as_json = jetdraft("check", bundle, "--threads", "1", "--json")
    assert as_json.exit_code == 2
    fields = json.loads(as_json.stdout)
    assert (fields["texts"][0]["first_difference"], fields["files"]) == (4, 10)
    assert list(range(1, 17)) in fields["widths"]["classes"]
    assert result.stderr.startswith("error: 1 methods gave another text")
    assert result.stderr.count("\n") == 1


def test_shows_graphs_shapes_quantization_and_bytes(bundle, lone_bundle):
    result = succeed("check", "--no-run", bundle)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    opened = Bundle.open(bundle)
    for expected in (
        f"bundle {bundle} (sha256 {opened.sha256[:12]})",
        f"methods {', '.join(methods_of(opened))}",
        "provider cpu",
        "vocabulary 288, end of text 0",
        "capacity 256 tokens, 64 rows",
        "quantization int8-rtn-b32; floats are float32",
        "KV layers 3, KV heads 2 x 16",
        "KV layers 1, KV heads 1 x 16",
        "input_ids int64 1 x n",
        "answer_rows int64 m",
        "past_key.0 float32 1 x 2 x 256 x 16",
        "past_key.0 float32 1 x 1 x 256 x 16",
        "candidates int64 1 x m x 64",
        "logits float32 1 x m x 288",
        # 3 layers of keys and values of 2 x 256 x 16 floats.
        "KV buffers 0.2 MB",
    ):
        assert expected in lines, expected
    for name, file in opened.files.items():
        assert f"{name} {file['bytes']:,} {file['sha256'][:12]}" in lines
    assert "drafter" not in succeed("check", "--no-run", lone_bundle).stdout
    as_json = jetdraft("check", "--no-run", bundle, "--json")
    assert json.loads(as_json.stdout) == json.loads((bundle / MANIFEST).read_text())
