"""What Spec-Verification (SpecDec, 2203.16487) accepts, and what it does to the text.

    jetdraft train drafter TARGET --kind block --data pairs.jsonl -o DRAFTER
    jetdraft export TARGET --head DRAFTER -o BUNDLE
    python benchmarks/tolerance.py BUNDLE --method block --prompts FILE --json OUT

Decodes each prompt greedily with the walk, and with each number of best tokens and each
tolerance, at a fixed length of drafts. Rows with the verifier are lossy: "same" counts
the texts of plain decoding, and ROUGE-L is the F1 of the longest common subsequence of
tokens with it. Passes are counted and nothing is timed.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import click
from stop_and_exit import rouge_l

import jetdraft

TOPS = (1, 3, 5)
TOLERANCES = (0.5, 1.0, 3.0)


def ways() -> dict[str, dict[str, Any]]:
    """The verifiers by their names in the table."""
    grid = {
        f"top {top}, tolerance {tolerance}": {
            "verifier": "tolerant",
            "top": top,
            "tolerance": tolerance,
        }
        for top in TOPS
        for tolerance in (TOLERANCES if top > 1 else TOLERANCES[-1:])
    }
    return {"walk": {}, **grid}


def row_of(
    model: jetdraft.Model, prompts: list[str], plain: list[list[int]], **options: Any
) -> dict[str, float]:
    """The figures of one verifier over all prompts."""
    results = [model.generate(prompt, **options) for prompt in prompts]
    texts = [result.token_ids for result in results]
    return {
        "tokens_per_pass": sum(map(len, texts))
        / sum(result.stats.target_passes for result in results),
        "acceptance_rate": sum(result.stats.accepted_tokens for result in results)
        / max(1, sum(sum(result.stats.evaluated_by_position) for result in results)),
        "same": sum(map(list.__eq__, texts, plain)),
        "rouge_l": mean(map(rouge_l, texts, plain)),
    }


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--method", default="block", show_default=True)
@click.option("--length", default=7, show_default=True, help="Tokens of a draft.")
@click.option("--prompts", "file", required=True, type=click.Path(path_type=Path))
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path,
    method: str,
    length: int,
    file: Path,
    new_tokens: int,
    output: Path | None,
) -> None:
    """Compare verifiers of BUNDLE."""
    lines = file.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    how: dict[str, Any] = {"max_new_tokens": new_tokens, "exact": False}
    with jetdraft.load(bundle, threads=1) as model:
        plain = [model.generate(p, method="none", **how).token_ids for p in prompts]
        rows = {}
        for name, settings in ways().items():
            rows[name] = row_of(
                model,
                prompts,
                plain,
                method=method,
                num_draft_tokens=length,
                drafting={"confidence": 0.0, **settings},
                **how,
            )
            figures = " ".join(f"{k} {v:.2f}" for k, v in rows[name].items())
            click.echo(f"{name:22} {figures} of {len(prompts)}")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
