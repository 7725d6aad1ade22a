"""Streams against a drafter, prompt lookup and plain decoding, on a task's test file.

Every method continues every prompt up to end-of-text, in turns and in one process. All
of them write the same text, so there is one exact match and one Rouge-L.

    python benchmarks/tasks.py BUNDLE /tmp/tasks/sql/test.jsonl --json OUT

The bundle should have all methods: `jetdraft export CHECKPOINT --drafter DRAFTER`.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft import Stats


@dataclass
class Row:
    """A way to decode and what came of it."""

    method: str
    num_draft_tokens: int | None
    exact: bool = True
    stats: Stats | None = None
    same: int = 0
    outputs: list[tuple[list[int], str]] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `generate`."""
        return {
            "method": self.method,
            "num_draft_tokens": self.num_draft_tokens,
            "exact": self.exact,
        }

    def add(self, result: jetdraft.Result) -> None:
        """Count one continuation."""
        self.outputs.append((result.token_ids, result.text))
        if self.stats is None:
            self.stats = result.stats
        else:
            self.stats.merge(result.stats)


def ways(methods: list[str], lengths: list[int]) -> list[Row]:
    """Plain decoding twice, every method at every length, and adaptively."""
    rows = [Row("none", None), Row("none", None, exact=False)]
    for method in methods:
        every = [None] if method == "auto" else [*lengths, None]
        rows += [Row(method, length) for length in every]
    return rows


def rouge_l(found: str, wanted: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004)."""
    one, other = found.split(), wanted.split()
    table = [0] * (len(other) + 1)
    for word in one:
        above = 0
        for i, there in enumerate(other, start=1):
            above, table[i] = (
                table[i],
                above + 1 if word == there else max(table[i], table[i - 1]),
            )
    common = table[-1]
    return 2 * common / (len(one) + len(other)) if one or other else 1.0


def figures(row: Row, plain: Row) -> dict[str, Any]:
    """The metrics of one row; `speedup` is over width-1 plain decoding."""
    stats, reference = row.stats, plain.stats
    assert stats is not None
    assert reference is not None
    speed, base = stats.tokens_per_second, reference.tokens_per_second
    return {
        "method": row.method,
        "num_draft_tokens": row.num_draft_tokens,
        "exact": row.exact,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.acceptance_rate,
        "accepted_by_position": stats.accepted_by_position,
        "tokens_per_second": speed,
        "speedup": speed / base if speed and base else None,
        "outside_ms_per_round": stats.outside_ms_per_round,
        "same_text": row.same,
    }


def show(report: dict[str, Any]) -> None:
    """A Markdown table."""
    click.echo(
        f"\n{report['prompts']} prompts, exact match {report['exact_match']:.2f}, "
        f"Rouge-L {report['rouge_l']:.2f}\n\n"
        "| method | K | tokens/pass | accepted | tokens/s | speed-up | same text |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for row in report["rows"]:
        name = row["method"] + ("" if row["exact"] else " (no-exact)")
        length = row["num_draft_tokens"] or ("-" if row["method"] == "none" else "any")
        rate = row["acceptance_rate"]
        click.echo(
            f"| {name} | {length} | {row['tokens_per_pass']:.2f} "
            f"| {'-' if rate is None else f'{rate:.2f}'} "
            f"| {row['tokens_per_second']:.1f} | {row['speedup']:.2f}x "
            f"| {row['same_text']} of {report['prompts']} |"
        )


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
    examples = [json.loads(line) for line in lines]
    named = methods.split(",") if methods else [*model.methods[1:], "auto"]
    rows = ways(named, lengths)
    for row in rows:
        model.generate(examples[0]["prompt"], **row.options, **options)
    for example in examples:
        for row in rows:
            model.forget()  # what the row before has taught it
            row.add(model.generate(example["prompt"], **row.options, **options))
    plain = rows[1]
    wanted = [example.get("completion", "") for example in examples]
    texts = [text for _, text in rows[0].outputs]
    for row in rows:
        pairs = zip(row.outputs, rows[0].outputs, strict=True)
        row.same = sum(one[0] == other[0] for one, other in pairs)
    pairs = list(zip(texts, wanted, strict=True))
    report = {
        "machine": model.parts.profiles.machine,
        "test": str(test),
        "options": options,
        "prompts": len(examples),
        "exact_match": sum(a.strip() == b.strip() for a, b in pairs) / len(pairs),
        "rouge_l": sum(rouge_l(a, b) for a, b in pairs) / len(pairs),
        "probe_ms": curve.probe,
        "pass_ms": curve.passes,
        "rows": [figures(row, plain) for row in rows],
    }
    show(report)
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
