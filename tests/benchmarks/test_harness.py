"""The scripts whose ways to decode take turns, on the toy bundle."""

import json

import heads
import never_slower
import pytest
import tasks
from click.testing import CliRunner

from jetdraft import Stats


@pytest.fixture
def measured(tmp_path, toy, monkeypatch):
    """Runs a script on the toy bundle and one prompt; gives its report."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    line = {"prompt": "The robot sees", "completion": " a wall."}
    prompts.write_text(json.dumps(line))
    monkeypatch.setattr(Stats, "add", Stats.add)  # heads.py puts another in its place

    def run(script, *words):
        known = {"BUNDLE": str(toy), "PROMPTS": str(prompts)}
        given = [known.get(word, word) for word in words]
        options = [*given, "--json", str(output)]
        result = CliRunner().invoke(script.main, options, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(output.read_text()), result.stdout

    return run


def test_heads_compares_bundles(measured):
    words = ("--bundle", "toy", "draft", "BUNDLE", "--prompts", "PROMPTS")
    report, shown = measured(heads, *words, "--max-new-tokens", "12")
    rows = {row["way"]: row for row in report["T=0.0"]["toy"]}
    assert {"width 1", "plain", "K = 1", "K = 5", "planned", "auto"} < set(rows)
    assert all(
        row["same_text"] == row["texts"] for row in rows.values() if row["exact"]
    )
    assert rows["K = 5"]["tokens_per_pass"] > 2
    assert rows["K = 5"]["draft_ms"] > 0
    assert "| toy |" in shown
    assert "| lookup, K = 4 |" in shown


def test_tasks_has_the_metrics_of_plain_decoding(measured):
    words = ("BUNDLE", "PROMPTS", "--methods", "draft,auto", "--num-draft-tokens", "2")
    report, shown = measured(tasks, *words, "--max-new-tokens", "8")
    assert [row["way"] for row in report["rows"]] == [
        *("plain", "width 1", "draft, K = 2", "draft, any K", "auto, any K")
    ]
    assert report["exact_match"] in (0.0, 1.0)
    assert all(row["same_text"] == 1 for row in report["rows"] if row["exact"])
    assert "1 prompts, exact match" in shown


def test_never_slower_measures_three_workloads(measured, monkeypatch):
    monkeypatch.setattr(never_slower, "LONG", {"max_new_tokens": 8, "ignore_eos": True})
    monkeypatch.setattr(never_slower, "SLOTS", never_slower.SLOTS[:2])
    words = ("BUNDLE", "--prompts", "PROMPTS", "--methods", "draft,lookup")
    report, _ = measured(never_slower, *words, "--repeats", "1")
    ways = [row["way"] for row in report["random"]["T=1.0"]]
    assert ways == [
        *("plain", "width 1", "auto", "auto, not exact"),
        *("never right", "never right, not exact"),
    ]
    wrong = report["random"]["T=0.0"][-1]
    assert wrong["acceptance_rate"] in (0.0, None)
    assert {row["way"] for row in report["code"]["T=0.8"]} > {"draft 8", "lookup 1"}
    assert report["repeated"]["again"][-1]["way"] == "recall"
