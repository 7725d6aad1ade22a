import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from jetdraft.bench import tuning
from jetdraft.bundle import Bundle
from jetdraft.devices.detection import Meter
from tests.devices.trees import POWER, write
from tests.programs import assert_refused, jetdraft, succeed

METRICS = {
    *("acceptance_rate", "tokens_per_pass", "accepted_by_position", "speedup"),
    *("tokens_per_second", "characters_per_second", "time_to_first_token"),
}
QUICK = ("--max-new-tokens=12", "--repeats=2", "--threads=1")
CONTENDERS = [
    ("none", None, False),
    ("none", None, True),
    *(
        (method, length, True)
        for method in ("lookup", "draft", "trigram", "cascade")
        for length in (1, 3, None)
    ),
    ("auto", None, True),
]
NOTHING = {"one wanted": [1, 2, 3], "no room": [1] * 256, "room for one": [1] * 255}


@pytest.fixture(scope="module")
def bench(bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    lines = [{"prompt": " the self the self"}, {"token_ids": [5, 6, 7, 5, 6, 7]}]
    prompts.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    flags = ("--prompts", prompts, "--lengths=1,3", "--output", folder / "out")
    result = succeed("bench", bundle, *flags, *QUICK)
    report = json.loads((folder / "out").read_text())
    return SimpleNamespace(result=result, report=report)


def test_every_method_and_length_has_a_row_and_plain_decoding_two(bench):
    rows = bench.report["rows"]
    found = [(row["method"], row["num_draft_tokens"], row["exact"]) for row in rows]
    assert found == CONTENDERS
    assert rows[0]["speedup"] == 1, "it is measured against the fastest plain decoding"
    for row in rows:
        assert set(row) >= METRICS
        assert row["tokens_per_second"] > 0
        assert row["time_to_first_token"] > 0
        assert row["tokens_per_pass"] >= 1
        assert row["speedup"] > 0
        assert 0 < row["outside_ms_per_round"] < 100
        assert row["tokens_per_joule"] is None
        assert row["texts"] == 4
        assert row["same_text"] == 4 or not row["exact"]
        if row["method"] == "draft" and row["num_draft_tokens"]:
            assert len(row["accepted_by_position"]) <= row["num_draft_tokens"]
            assert f"draft:{row['num_draft_tokens']}" in row["rounds_by_choice"]
    ratios = {
        round(row["characters_per_second"] / row["tokens_per_second"], 6)
        for row in rows
        if row["exact"]
    }
    assert len(ratios) == 1
    assert 0 < ratios.pop() < 10


def test_report_says_where_and_what_was_measured(bench, bundle):
    report = bench.report
    assert {"processor", "threads", "cores", "provider"} <= set(report["machine"])
    assert {"jetdraft", "onnxruntime", "python"} <= set(report["versions"])
    assert report["bundle_sha256"] == Bundle.open(bundle).sha256
    assert report["peak_memory_bytes"] > 10e6
    assert 0 < report["load_seconds"] < 60
    assert report["options"]["max_new_tokens"] == 12
    assert report["options"]["prompts"] == 2
    assert report["machine"]["power_mode"] is None
    curves = report["pass_ms"]
    assert set(curves) == {"target", "drafter"}
    for curve in curves.values():
        assert list(curve) == [str(width) for width in range(1, 9)]
        assert all(time > 0 for time in curve.values())


def test_table_shows_every_row(bench):
    header, *lines = bench.result.stdout.splitlines()
    assert header.split()[:3] == ["method", "K", "exact"]
    assert [line.split()[:3] for line in lines[: len(CONTENDERS)]] == [
        [method, str(length or "-"), "yes" if exact else "no"]
        for method, length, exact in CONTENDERS
    ]
    for words in ("pass ms by width", "peak memory", "energy not available"):
        assert words in bench.result.stdout
    assert "measuring" in bench.result.stderr
    assert "measuring" not in bench.result.stdout


def test_without_prompts_there_are_some_of_its_own(lone_bundle):
    flags = ("--methods=lookup", "--lengths=2", *QUICK[:1], "--repeats=1")
    result = succeed("bench", lone_bundle, *flags, "--threads=1")
    methods = [line.split()[0] for line in result.stdout.splitlines()[1:4]]
    assert methods == ["none", "none", "lookup"]
    assert "4/4" in result.stdout


@pytest.mark.parametrize("prompt", NOTHING.values(), ids=NOTHING)
def test_what_was_not_measured_is_a_dash(lone_bundle, tmp_path, prompt):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"token_ids": prompt}))
    flags = ("--prompts", file, "--methods=none", "-o", tmp_path / "out")
    limits = ("--max-new-tokens=1", "--repeats=1", "--threads=1")
    result = succeed("bench", lone_bundle, *flags, *limits)
    assert result.stdout.splitlines()[1].split()[5] == "-x"
    assert json.loads((tmp_path / "out").read_text())["rows"][0]["speedup"] is None


def test_a_file_that_is_no_report_is_kept(bundle, tmp_path):
    for name, text in (("notes", "precious"), ("bundle.json", '{"schema": 4}')):
        (tmp_path / name).write_text(text)
        result = jetdraft("bench", bundle, "-o", tmp_path / name, *QUICK)
        assert_refused(result, "holds no report")
        assert (tmp_path / name).read_text() == text


def test_a_report_is_written_through_a_link_and_is_the_json_on_stdout(
    lone_bundle, tmp_path
):
    """The text of a prompt may hold any line separator."""
    report, link = tmp_path / "real.json", tmp_path / "link.json"
    report.write_text('{"rows": []}')
    link.symlink_to(report)
    line = json.dumps({"prompt": "one\u2028two"}, ensure_ascii=False)
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n", encoding="utf-8")
    flags = ("--methods=none", "-n", "2", "--repeats=1", "-t", "1", "--json")
    given = ("--prompts", tmp_path / "prompts.jsonl", "-o", link)
    fields = json.loads(succeed("bench", lone_bundle, *flags, *given).stdout)
    assert link.is_symlink()
    assert json.loads(report.read_text()) == fields
    assert [row["method"] for row in fields["rows"]] == ["none", "none"]
    assert (fields["options"]["temperature"], fields["options"]["seed"]) == (0.0, 0)


def test_energy_is_measured_where_there_are_monitors(bundle, tmp_path, monkeypatch):
    metered = partial(Meter, write(tmp_path, POWER), interval=0.001)
    monkeypatch.setattr("jetdraft.cli.bench.Meter", metered)
    report = tmp_path / "out.json"
    flags = ("--methods=lookup", "--lengths=2", "--output", report)
    assert "tokens/J" in succeed("bench", bundle, *flags, *QUICK).stdout
    for row in json.loads(report.read_text())["rows"]:
        assert 0 < row["tokens_per_joule"] <= row["tokens_per_second"] / 10 * 1.5


@pytest.fixture
def one_turn(monkeypatch):
    monkeypatch.setattr(tuning, "TURNS", 1)


def test_the_table_and_the_profile(copied_bundle, one_turn):
    done = succeed("tune", copied_bundle, "--threads", "1")
    widths = [line.split()[0] for line in done.stdout.splitlines()[1:33]]
    assert widths == [str(width) for width in range(1, 33)]
    assert "lookup" in done.stdout
    assert (copied_bundle / "profiles" / "cpu-1-tuning.json").is_file()


def test_json_is_one_object(copied_bundle, one_turn):
    done = jetdraft("tune", copied_bundle, "--threads", "1", "--json")
    found = json.loads(done.stdout)
    assert set(found["curve"]) >= {"passes", "trees", "drafts", "compaction"}
    assert found["machine"]["threads"] == 1


def test_where_the_times_cannot_be_kept_none_are_measured(copied_bundle):
    shutil.rmtree(copied_bundle / "profiles")
    (copied_bundle / "profiles").write_text("a file in the place of the folder")
    refused = jetdraft("tune", copied_bundle, "-t", "1")
    assert_refused(refused, "cannot write", "cpu-1-tuning")
