"""Compares rules that stop a draft early with drafts of fixed and adaptive length.

    jetdraft train acceptance BUNDLE --prompts other.jsonl
    python benchmarks/stopping.py BUNDLE --prompts p.jsonl --json OUT

All run in turns in one process, on the same prompts, at T = 0 and 0.8.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from never_slower import PLAIN, WIDTH_1, Way, alternate, ratios, show

import jetdraft

RULES = {
    "confidence": (0.3, 0.6, 0.8),
    "product": (0.1, 0.3, 0.6),
    "learned": (0.3, 0.7, 0.9),
}


def ways() -> list[Way]:
    """No rule at fixed lengths, and each rule at each threshold."""
    rows = [Way("plain", PLAIN), Way("width 1", WIDTH_1)]
    for length in (1, 3, 8, None):
        options = {"method": "draft", "num_draft_tokens": length}
        rows.append(Way(f"draft {length or 'any'}", options))
    for rule, thresholds in RULES.items():
        for threshold in thresholds:
            for length in (8, None):
                options = {
                    "method": "draft",
                    "num_draft_tokens": length,
                    "drafting": {"stopping": rule, "stop_threshold": threshold},
                }
                rows.append(Way(f"{rule} {threshold} {length or 'any'}", options))
    return rows


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--repeats", default=1, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(bundle: Path, prompts: Path, repeats: int, output: Path | None) -> None:
    """Measure all rules on BUNDLE."""
    model = jetdraft.load(bundle)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    ids = [model.prompt(json.loads(line)["prompt"]) for line in lines]
    report: dict[str, Any] = {"machine": model.parts.profiles.machine}
    for temperature in (0.0, 0.8):
        rows = ways()
        settings = {"temperature": temperature, "max_new_tokens": 96}
        alternate(model, rows, ids, repeats, **settings)
        report[f"T={temperature}"] = ratios(rows)
        show(f"T={temperature}", report[f"T={temperature}"])
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
