"""What Stop and Exit (2401.09964) saves and costs on completions of held-out code.

    jetdraft train exit examples/pycode/target --data code.txt --exits 2,4 -o HEAD
    jetdraft export examples/pycode/target --exit-after 4 -o BUNDLE
    python benchmarks/stop_and_exit.py BUNDLE HEAD --json OUT

Completes 10 tokens at places of the example target's held-out files, greedily, with
plain decoding and with each pair of thresholds, in turns in one process. ROUGE-L is the
F1 of the longest common subsequence of tokens, with the file and with plain decoding. A
stopped completion was stopped wrongly if the next token of plain decoding, behind the
same tokens, is the file's. The CPU time is that of a completion whose prompt is read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import click
import numpy as np

import jetdraft

EXAMPLE = Path(__file__).parents[1] / "examples" / "pycode"
NEW_TOKENS, PROMPT = 10, 128
NEVER = 1.0
SWEEP = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
PLAIN: dict[str, Any] = {"method": "none", "exact": False, "max_new_tokens": NEW_TOKENS}


def rouge_l(one: Sequence[int], other: Sequence[int]) -> float:
    """The F1 of the longest common subsequence; 1 for two empty sequences."""
    if not one or not other:
        return float(len(one) == len(other))
    lengths = [0] * (len(other) + 1)
    for token in one:
        before = 0
        for place, twin in enumerate(other, start=1):
            longest = (
                before + 1 if token == twin else max(lengths[place - 1 : place + 1])
            )
            before, lengths[place] = lengths[place], longest
    return 2 * lengths[-1] / (len(one) + len(other))


@dataclass
class Way:
    """One pair of thresholds, and what it did; the first way is plain decoding."""

    stop: float
    exit: float
    rows: list[dict[str, float]] = field(default_factory=list)

    def to_json(self, layers: int) -> dict[str, Any]:
        """The means, in the order of the table."""
        tokens = sum(row["tokens"] for row in self.rows)
        stopped = [row for row in self.rows if row["stopped"]]
        return {
            "stop_threshold": self.stop,
            "exit_threshold": self.exit,
            "tokens": tokens / len(self.rows),
            "exited": sum(row["exited"] for row in self.rows) / tokens,
            "layers_skipped": sum(row["skipped"] for row in self.rows) / tokens,
            "layers": layers,
            "rouge_l_file": mean(row["file"] for row in self.rows),
            "rouge_l_plain": mean(row["plain"] for row in self.rows),
            "stopped": len(stopped) / len(self.rows),
            "stopped_wrongly": mean(row["wrong"] for row in stopped)
            if stopped
            else 0.0,
            "cpu_ms": mean(row["cpu_ms"] for row in self.rows),
        }


def places(
    model: jetdraft.Model, count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts of held-out files, and the tokens that follow."""
    sys.path.insert(0, str(EXAMPLE))
    import corpus

    rng = np.random.default_rng(seed)
    texts = [model.parts.text.encode(text) for text in corpus.read()[1].values()]
    texts = [text for text in texts if len(text) > 2 * PROMPT]
    chosen = []
    for _ in range(count):
        text = texts[rng.integers(len(texts))]
        start = int(rng.integers(len(text) - PROMPT - NEW_TOKENS))
        end = start + PROMPT
        chosen.append((text[start:end], text[end : end + NEW_TOKENS]))
    return chosen


def complete(
    model: jetdraft.Model, way: Way, head: Path, prompt: list[int], truth: list[int],
    plain: list[int],
) -> list[int]:  # fmt: skip
    """Complete a prompt, and note what that did; gives the tokens."""
    how = dict(PLAIN)
    if (way.stop, way.exit) != (NEVER, NEVER):
        how |= {"stop_and_exit": head, "stop_threshold": way.stop}
        how |= {"exit_threshold": way.exit}
    start = time.process_time()
    result = model.generate(token_ids=prompt, **how)
    cpu_seconds = time.process_time() - start
    tokens, stats = result.token_ids, result.stats
    stopped, wrong = result.finish_reason == "early stop", False
    if stopped:
        further = model.generate(
            token_ids=prompt + tokens, **PLAIN | {"max_new_tokens": 1}
        )
        wrong = further.token_ids[:1] == truth[len(tokens) : len(tokens) + 1]
    way.rows.append(
        {
            "tokens": len(tokens),
            "exited": stats.exited_tokens,
            "skipped": stats.skipped_layers,
            "file": rouge_l(tokens, truth),
            "plain": rouge_l(tokens, plain or tokens),
            "stopped": stopped,
            "wrong": wrong,
            "cpu_ms": 1e3 * cpu_seconds,
        }
    )
    return tokens


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("head", type=click.Path(path_type=Path))
@click.option("--count", default=300, show_default=True, help="Completions.")
@click.option("--threads", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path, head: Path, count: int, threads: int, seed: int, output: Path | None
) -> None:
    """Measure HEAD on BUNDLE."""
    model = jetdraft.load(bundle, threads=threads)
    pairs = [(t, NEVER) for t in SWEEP] + [(NEVER, t) for t in SWEEP]
    ways = [Way(NEVER, NEVER), *(Way(*pair) for pair in pairs), Way(0.9, 0.9)]
    for prompt, truth in places(model, count, seed):
        # Reads the prompt, which stays in the buffers for all ways.
        model.generate(token_ids=prompt, **PLAIN | {"max_new_tokens": 1})
        plain: list[int] = []
        for way in ways:
            tokens = complete(model, way, head, prompt, truth, plain)
            plain = plain or tokens
    layers = len(model.bundle.target.contract.kv_shapes)
    rows = [way.to_json(layers) for way in ways]
    for row in rows:
        print("  ".join(f"{name} {number:.3g}" for name, number in row.items()))
    if output is not None:
        report = {"machine": model.parts.profiles.machine, "rows": rows}
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
