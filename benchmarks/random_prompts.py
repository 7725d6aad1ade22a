"""Prompts of random tokens, on which no draft should pay: `auto` must not lose there.

python benchmarks/random_prompts.py -o /tmp/random.jsonl
"""

import json
from pathlib import Path

import click
import numpy as np


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--vocabulary", default=4096, show_default=True)
@click.option("--prompts", default=6, show_default=True)
@click.option("--length", default=128, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(output: Path, vocabulary: int, prompts: int, length: int, seed: int) -> None:
    """Write JSON lines with `token_ids` for `jetdraft bench --prompts`."""
    drawn = np.random.default_rng(seed).integers(1, vocabulary, (prompts, length))
    lines = "".join(json.dumps({"token_ids": ids}) + "\n" for ids in drawn.tolist())
    output.write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
