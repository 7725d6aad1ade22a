"""What drafts give a Whisper: word error rate, decoding and whole time by method.

    python benchmarks/speech.py bundles/whisper CLIPS --method none,draft --json F

CLIPS has pairs of NAME.wav and NAME.txt, what is said in it. The methods transcribe
each clip in turns; the first turn warms up and does not count. Times are sums over the
clips, medians over the turns, and ratios to `none` in the same turn. "Decode" has no
encoder and no first round. Run nothing beside.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import click

import jetdraft

Figures = dict[str, float]


def words_of(text: str) -> list[str]:
    """The words, without case and punctuation."""
    return re.findall(r"[a-z0-9']+", text.lower())


def errors(said: list[str], found: list[str]) -> int:
    """The fewest insertions, deletions and substitutions between two texts."""
    row = list(range(len(found) + 1))
    for i, word in enumerate(said, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(found, start=1):
            best = min(before + (word != other), row[j] + 1, row[j - 1] + 1)
            before, row[j] = row[j], best
    return row[-1]


def measured(
    model: jetdraft.Model, said: dict[Path, list[str]], **options: Any
) -> tuple[Figures, list[list[int]]]:
    """The figures of all sounds in one turn, and their tokens."""
    stats, tokens, wrong = jetdraft.Stats("", True, 0), [], 0
    start = time.perf_counter()
    for sound, words in said.items():
        found = model.transcribe(sound, **options)
        stats.merge(found.stats)
        tokens.append(found.token_ids)
        wrong += errors(words, words_of(found.text))
    figures = {
        "seconds": time.perf_counter() - start,
        "decode_seconds": stats.decode_seconds,
        "tokens_per_second": stats.tokens_per_second or 0.0,
        "tokens_per_pass": stats.tokens_per_pass or 0.0,
        "acceptance_rate": stats.acceptance_rate or 0.0,
        "word_error_rate": wrong / sum(map(len, said.values())),
    }
    return figures, tokens


@click.command()
@click.argument("bundle")
@click.argument("clips", type=click.Path(path_type=Path))
@click.option("--method", default="none,draft,lookup,auto")
@click.option("--num-draft-tokens", type=int)
@click.option("--turns", default=3)
@click.option("--threads", default=2)
@click.option("--timestamps/--no-timestamps", default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    bundle: str,
    clips: Path,
    method: str,
    num_draft_tokens: int | None,
    turns: int,
    threads: int,
    timestamps: bool,
    file: Path | None,
) -> None:
    """Transcribe the clips with each method, in turns."""
    model = jetdraft.load(bundle, threads=threads)
    sounds = sorted(clips.glob("*.wav"))
    said = {s: words_of(s.with_suffix(".txt").read_text()) for s in sounds}
    runs: dict[str, list[Figures]] = {m: [] for m in method.split(",")}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(turns + 1):
        for name, results in runs.items():
            count = None if name == "none" else num_draft_tokens
            options = {"timestamps": timestamps, "method": name}
            figures, tokens = measured(model, said, num_draft_tokens=count, **options)
            assert texts.setdefault(name, tokens) == tokens
            if turn:
                results.append(figures)
    rows = {}
    for name, results in runs.items():
        row = {key: statistics.median(r[key] for r in results) for key in results[0]}
        for key in ("seconds", "decode_seconds"):
            pairs = zip(runs[next(iter(runs))], results, strict=True)
            row[f"{key}_speedup"] = statistics.median(a[key] / b[key] for a, b in pairs)
        row["same_text"] = texts[name] == texts[next(iter(runs))]
        rows[name] = row
        click.echo(f"{name:8} " + "  ".join(f"{k} {v:.3g}" for k, v in row.items()))
    if file is not None:
        file.write_text(json.dumps({"bundle": bundle, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
