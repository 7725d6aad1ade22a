"""What drafts give a Whisper: word error rates and decoding times by method.

    python benchmarks/clips.py clips
    python benchmarks/speech.py bundles/whisper clips --method plain,draft:3 --json F

The folder has pairs of NAME.wav and NAME.txt, what is said in it. draft:3 drafts three
tokens in every round, draft as many as its controller likes. Times are sums over the
clips, medians over the turns, and ratios to the first method in the same turn. They
have no encoder and no first round; what the encoders take is in a row of their own. Run
nothing beside.
"""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import click
from contenders import Turns, contenders, line

import jetdraft
from jetdraft.contracts.source_contract import SourceContract
from jetdraft.runtime.hearing.log_mel import log_mel
from jetdraft.runtime.hearing.sound import read_sound


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


def encoder_ms(model: jetdraft.Model, sound: Path) -> dict[str, float]:
    """What each encoder takes for a window, the least of five."""
    graphs = {"target": model.parts.target, "drafter": model.parts.drafter}
    times: dict[str, list[float]] = {name: [] for name, g in graphs.items() if g}
    for turn in range(5):
        samples = read_sound(sound)[turn:]  # another source, or it would not be read
        contract = model.bundle.target.contract
        features = log_mel(
            samples, contract.source_bins, SourceContract(contract).frames
        )
        for name, runs in times.items():
            start = time.perf_counter()
            graphs[name].source.read(features)
            runs.append(1e3 * (time.perf_counter() - start))
    model.forget()
    return {name: min(runs) for name, runs in times.items()}


@click.command()
@click.argument("bundle")
@click.argument("clips", type=click.Path(path_type=Path))
@click.option("--method", default="plain,none,draft:3,lookup,auto")
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
    write = partial(model.transcribe, timestamps=timestamps)
    runs = Turns(contenders(method), sounds, write).run(turns)
    encoders = encoder_ms(model, sounds[0])
    rows = runs.rows()
    for name, row in rows.items():
        texts = [words_of(text.text) for text in runs.said(name)]
        wrong = sum(map(errors, said.values(), texts))
        row["word_error_rate"] = wrong / sum(map(len, said.values()))
        click.echo(line(name, row))
    click.echo(f"encoders, ms a window: {encoders}")
    curve = model.parts.curve
    report = {
        "bundle": bundle,
        "clips": [sound.stem for sound in sounds],
        "threads": threads,
        "encoder_ms": encoders,
        "pass_ms": {str(n): curve.pass_ms(n) for n in range(1, 9)},
        "draft_ms": curve.drafts,
        "rows": rows,
    }
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
