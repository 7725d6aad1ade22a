"""Compares every shape and size of draft tree with plain decoding, in one process.

python benchmarks/trees.py bundles/pycode --prompts examples/pycode/prompts.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

import jetdraft
from jetdraft.runtime.measured.stats import Stats

SIZES = (3, 7, 15)
SHAPES = ("chain", "best", "heap", "threshold", "rerank", "comb", "merged")


def contenders() -> dict[str, dict[str, Any]]:
    """Options of `generate` by name; speed-ups are against the first."""
    ways: dict[str, dict[str, Any]] = {
        "plain, width 1": {"method": "none", "exact": False},
        "plain": {"method": "none"},
        "chain 1": {"method": "draft", "num_draft_tokens": 1},
    }
    for size in SIZES:
        for shape in SHAPES:
            ways[f"{shape} {size}"] = {
                "method": "draft",
                "drafting": {"tree": shape},
                "num_draft_tokens": size,
            }
        ways[f"best by rank {size}"] = {
            "method": "draft",
            "drafting": {"tree": "best", "siblings": "deterministic"},
            "num_draft_tokens": size,
        }
    for branching, kind, verifier in (
        ([2, 2], "coupled", "walk"),
        ([4, 2], "coupled", "walk"),
        ([4, 2], "with-replacement", "recursive"),
        ([4, 2], "without-replacement", "recursive"),
        ([4, 2], "with-replacement", "k-seq"),
        ([4, 2], "top-and-one", "greedy-plus-one"),
        ([1, 1, 1], "with-replacement", "rejection"),
    ):
        name = f"k-ary {branching} {kind}, {verifier}"
        ways[name] = {
            "method": "draft",
            "drafting": {
                "tree": "k-ary",
                "branching": branching,
                "siblings": kind,
                "verifier": verifier,
            },
            "exact": verifier == "walk",
        }
    return ways


@click.command()
@click.argument("bundle")
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=4, show_default=True, help="Prompts to take.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: str,
    prompts: Path,
    count: int,
    max_new_tokens: int,
    temperature: float,
    output: Path | None,
) -> None:
    """Print a Markdown table of BUNDLE's shapes."""
    model = jetdraft.load(bundle)
    texts = [json.loads(x)["prompt"] for x in prompts.read_text().splitlines()[:count]]
    ways = contenders()
    totals = {name: Stats(name, exact=True, prompt_tokens=0) for name in ways}
    same = dict.fromkeys(ways, 0)
    steps = [(text, name) for text in texts for name in ways]
    references: dict[str, list[int]] = {}
    with click.progressbar(steps, file=sys.stderr) as bar:
        for text, name in bar:
            common = {"max_new_tokens": max_new_tokens, "temperature": temperature}
            if text not in references:
                plain = model.generate(text, method="none", ignore_eos=True, **common)
                references[text] = plain.token_ids
            result = model.generate(text, ignore_eos=True, **common, **ways[name])
            totals[name].merge(result.stats)
            same[name] += result.token_ids == references[text]
    rows = []
    fastest = totals["plain, width 1"].tokens_per_second or np.nan
    click.echo("| draft | tokens/pass | round ms | speed-up | same text |")
    click.echo("| --- | --- | --- | --- | --- |")
    for name, stats in totals.items():
        rounds = stats.target_passes - stats.generations
        round_ms = 1e3 * stats.decode_seconds / max(1, rounds)
        speedup = (stats.tokens_per_second or np.nan) / fastest
        per_pass = stats.tokens_per_pass or np.nan
        click.echo(
            f"| {name} | {per_pass:.2f} | {round_ms:.2f} | {speedup:.2f}x "
            f"| {same[name]} of {len(texts)} |"
        )
        rows.append(
            {
                "draft": name,
                "tokens_per_pass": per_pass,
                "round_ms": round_ms,
                "speedup": speedup,
                "same_text": same[name],
                "texts": len(texts),
            }
        )
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        fields = {
            "rows": rows,
            "temperature": temperature,
            "machine": model.parts.profiles.machine,
            "bundle": str(model.bundle.sha256),
        }
        output.write_text(json.dumps(fields, indent=2) + "\n")


if __name__ == "__main__":
    main()
