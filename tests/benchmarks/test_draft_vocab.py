"""The table of a draft vocabulary, on the tiny pair."""

from __future__ import annotations

import json

from click.testing import CliRunner
from draft_vocab import main

from tests.tiny import VOCAB_SIZE


def test_it_prints_a_row_for_each_count(pair, bundle, tmp_path):
    text, prompts = tmp_path / "text.txt", tmp_path / "prompts.jsonl"
    text.write_text("the self import range in print def return for " * 30)
    prompts.write_text('{"prompt": " the self"}\n{"token_ids": [5, 80, 33]}\n')
    result = CliRunner().invoke(
        main,
        [
            *map(str, (bundle, pair.target, pair.drafter)),
            *("--calibration", str(text), "--prompts", str(prompts)),
            *("--counts", "120", "-w", str(tmp_path / "cuts"), "--turns", "1"),
            *("--new-tokens", "24", "--json", str(tmp_path / "rows.json")),
        ],
        catch_exceptions=False,
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["draft_vocab"] for row in rows] == [VOCAB_SIZE, 120]
    assert all(row["same_texts"] and row["draft_ms"] > 0 for row in rows)
    assert "| 120 |" in result.stdout
