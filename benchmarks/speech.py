"""What drafts give a Whisper: word error rate, decoding and whole time by method.

    python benchmarks/clips.py clips
    python benchmarks/speech.py bundles/whisper clips --method none,draft:3 --json F

The folder has pairs of NAME.wav and NAME.txt, what is said in it. The methods
transcribe all clips in turns; the first turn warms up and does not count. draft:3
drafts three tokens in every round, draft as many as its controller likes. Times are
sums over the clips, medians over the turns, and ratios to the first method in the same
turn. "Decode" has no encoder and no first round. Run nothing beside.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from contenders import Figures, contenders, figures_of, in_turns, line

import jetdraft


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
        **figures_of(stats),
        "word_error_rate": wrong / sum(map(len, said.values())),
    }
    return figures, tokens


@click.command()
@click.argument("bundle")
@click.argument("clips", type=click.Path(path_type=Path))
@click.option("--method", default="none,draft:3,lookup,auto")
@click.option("--turns", default=3)
@click.option("--threads", default=2)
@click.option("--timestamps/--no-timestamps", default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    bundle: str,
    clips: Path,
    method: str,
    turns: int,
    threads: int,
    timestamps: bool,
    file: Path | None,
) -> None:
    """Transcribe the clips with each method, in turns."""
    model = jetdraft.load(bundle, threads=threads)
    sounds = sorted(clips.glob("*.wav"))
    said = {s: words_of(s.with_suffix(".txt").read_text()) for s in sounds}
    measure = partial(measured, model, said, timestamps=timestamps)
    rows = in_turns(contenders(method), measure, turns)
    for name, row in rows.items():
        click.echo(line(name, row))
    if file is not None:
        file.write_text(json.dumps({"bundle": bundle, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
