"""Streams against a drafter, prompt lookup and plain decoding, on a task's test file.

    python benchmarks/tasks.py BUNDLE /tmp/tasks/sql/test.jsonl --json OUT

Every method continues every prompt up to end-of-text. All of them write the same text,
so there is one exact match and one Rouge-L. The bundle should have all methods:
`jetdraft export CHECKPOINT --drafter DRAFTER`.
"""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
from harness import PLAIN, WIDTH_1, Way, alternate, read_prompts, show, write

import jetdraft


def ways(model: jetdraft.Model, methods: list[str], lengths: list[int]) -> list[Way]:
    """Plain decoding twice, every method at every length, and adaptively."""
    rows = [Way("plain", model, PLAIN), Way("width 1", model, WIDTH_1)]
    for method in methods:
        for length in () if method == "auto" else lengths:
            options = {"method": method, "num_draft_tokens": length}
            rows.append(Way(f"{method}, K = {length}", model, options))
        rows.append(Way(f"{method}, any K", model, {"method": method}))
    return rows


def rouge_l(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """F1 of the longest common subsequence (Lin, 2004)."""
    table = [0] * (len(wanted) + 1)
    for word in found:
        above = 0
        for i, there in enumerate(wanted, start=1):
            above, table[i] = (
                table[i],
                above + 1 if word == there else max(table[i], table[i - 1]),
            )
    size = len(found) + len(wanted)
    return 2 * table[-1] / size if size else 1.0


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("test", type=click.Path(path_type=Path))
@click.option("--methods", help="Comma list; default: all of the bundle and auto.")
@click.option("--prompts", default=40, show_default=True, help="How many of them.")
@click.option("--num-draft-tokens", default="1,2,3,4", show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="For texts, which do not end.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path,
    test: Path,
    methods: str | None,
    prompts: int,
    num_draft_tokens: str,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure every method of BUNDLE on the prompts of TEST."""
    model = jetdraft.load(bundle)
    curve = deepcopy(model.parts.curve)  # every round corrects the model's own
    lengths = [int(length) for length in num_draft_tokens.split(",")]
    lines = test.read_text(encoding="utf-8").splitlines()[:prompts]
    wanted = [json.loads(line).get("completion", "") for line in lines]
    named = methods.split(",") if methods else [*model.methods[1:], "auto"]
    rows = ways(model, named, lengths)
    alternate(rows, read_prompts(test, prompts), **options)
    pairs = list(zip((r.text for r in rows[0].results), wanted, strict=True))
    report = {
        "machine": model.parts.profiles.machine,
        "test": str(test),
        "options": options,
        "prompts": len(wanted),
        "exact_match": sum(a.strip() == b.strip() for a, b in pairs) / len(pairs),
        "rouge_l": sum(rouge_l(a.split(), b.split()) for a, b in pairs) / len(pairs),
        "probe_ms": curve.probe,
        "pass_ms": curve.passes,
        "rows": [row.figures(*rows[:2]) for row in rows],
    }
    show(
        f"{len(wanted)} prompts, exact match {report['exact_match']:.2f}, "
        f"Rouge-L {report['rouge_l']:.2f}",
        [
            {
                "way": row["way"],
                "tokens/pass": f"{row['tokens_per_pass']:.2f}",
                "accepted": f"{row['acceptance_rate'] or 0:.2f}",
                "tokens/s": f"{row['tokens_per_second']:.1f}",
                "over width 1": f"{row['over_width_1']:.2f}x",
                "same text": f"{row['same_text']} of {row['texts']}",
            }
            for row in report["rows"]
        ],
    )
    write(report, output)


if __name__ == "__main__":
    main()
