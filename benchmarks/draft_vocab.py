"""What a cut of the drafter's vocabulary gives: draft time, acceptance, tokens/s.

    python benchmarks/draft_vocab.py BUNDLE TARGET DRAFTER --calibration TEXT \
        --prompts code.jsonl --counts 32768,8192 -w /tmp/cuts --json FILE

BUNDLE is the exported pair of the checkpoints TARGET and DRAFTER. For each count its
drafter is exported again, cut as `jetdraft export --draft-vocab COUNT` cuts it; the
target's graphs stay. A cut that lies in the folder -w is used again, and `--turns 0`
only makes them. Bundles run in turns, greedy; the median over the turns is shown, and
over plain decoding of the same bundle in the same turn. Run nothing beside.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Tokenizer

import jetdraft
from jetdraft import Stats
from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.exporter import _cut, _cut_job, _job, _write_graphs
from jetdraft.export.measures import Measures
from jetdraft.manifest import MANIFEST
from jetdraft.recipe import Recipe

PASSES = 40
"""Passes of the drafter over one row, whose median is the time of a draft step."""


def say(fact: str) -> None:
    """A line of progress, with the seconds since the start."""
    click.echo(f"{time.perf_counter() - STARTED:5.0f} s  {fact}", err=True)


def cut_bundle(
    bundle: Bundle,
    target: Checkpoint,
    source: str,
    text: Path,
    count: int,
    folder: Path,
) -> None:
    """Write the bundle with a drafter that chooses among `count` tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in bundle.path.iterdir():
        if file.is_file() and not file.name.startswith((DRAFTER, MANIFEST)):
            os.link(file, folder / file.name)
    entry = bundle.graphs[DRAFTER]
    options = ExportOptions(
        Recipe.from_json(bundle.target.quantization),
        Recipe.from_json(entry.quantization),
        calibration=text,
        draft_vocab=count,
    )
    measures = Measures(
        {TARGET: target, DRAFTER: Checkpoint.load(source, torch.float32)},
        {
            TARGET: bundle.target.contract,
            DRAFTER: replace(entry.contract, draft_vocab=count, tree=False),
        },
        options,
        lambda *state: None,
    )
    cut = _cut(measures, None)
    assert cut is not None
    job = _cut_job(_job(folder, DRAFTER, cut.checkpoint, measures), cut)
    graphs = {**bundle.graphs, DRAFTER: _write_graphs(job)}
    replace(bundle, path=folder, graphs=graphs, files={}).save()


def measured(
    bundle: Bundle, prompts: list[list[int]], k: int, new: int
) -> dict[str, Any]:
    """Milliseconds of a draft step, and the figures of the texts."""
    with jetdraft.load(bundle.path, threads=2) as model:
        drafter = model.parts.drafter
        assert drafter is not None
        how: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True}
        drafted = {"method": "draft", "num_draft_tokens": k}
        # The first generation measures the machine.
        model.generate(token_ids=prompts[0], **{**how, "max_new_tokens": 4}, **drafted)
        model.forget()
        stats, plain, texts = list[Stats](), list[Stats](), []
        for prompt in prompts:
            result = model.generate(token_ids=prompt, **drafted, **how)
            texts.append(result.token_ids)
            stats.append(result.stats)
            model.forget()
            plain.append(model.generate(token_ids=prompt, method="none", **how).stats)
            model.forget()
        # After the texts: weights that were just loaded do not lie in huge pages yet.
        times = []
        for _ in range(PASSES):
            before = drafter.seconds
            drafter.run([100])
            times.append(1e3 * (drafter.seconds - before))
    total, without = merged(stats), merged(plain)
    speeds = total.tokens_per_second or 0.0, without.tokens_per_second or 1.0
    return {
        "draft_ms": statistics.median(times),
        "tokens_per_second": speeds[0],
        "over_plain": speeds[0] / speeds[1],
        "acceptance": total.acceptance_rate or 0.0,
        "by_position": total.accepted_by_position,
        "tokens_per_pass": total.tokens_per_pass,
        "texts": texts,
    }


def merged(parts: list[Stats]) -> Stats:
    """The sums of some generations."""
    first, *others = parts
    for other in others:
        first.merge(other)
    return first


STARTED = time.perf_counter()


@click.command()
@click.argument("bundle", type=Path)
@click.argument("target")
@click.argument("drafter")
@click.option("--calibration", type=Path, required=True)
@click.option("--prompts", "files", type=Path, multiple=True, required=True)
@click.option("--counts", default="32768,8192", show_default=True)
@click.option("-w", "--work", type=Path, required=True)
@click.option("-k", "--draft-tokens", default=3, show_default=True)
@click.option("-n", "--new-tokens", default=64, show_default=True)
@click.option("--turns", default=2, show_default=True)
@click.option("--count", default=4, show_default=True, help="Prompts of each file.")
@click.option("--json", "output", type=Path)
def main(
    bundle: Path,
    target: str,
    drafter: str,
    calibration: Path,
    files: tuple[Path, ...],
    counts: str,
    work: Path,
    draft_tokens: int,
    new_tokens: int,
    turns: int,
    count: int,
    output: Path | None,
) -> None:
    """Measure BUNDLE and its cut versions."""
    prompts = [p for file in files for p in prompts_of(file, bundle)[:count]]
    whole = Bundle.open(bundle)
    bundles = {whole.target.contract.vocab_size: whole}
    folders = {int(size): work / size for size in counts.split(",")}
    if not all((folder / MANIFEST).exists() for folder in folders.values()):
        say(f"reads {target}")
        checkpoint = Checkpoint.load(target, torch.float32)
        for size, folder in folders.items():
            say(f"exports the drafter with {size} tokens")
            cut_bundle(whole, checkpoint, drafter, calibration, size, folder)
        del checkpoint
    if not turns:
        return
    bundles |= {size: Bundle.open(folder) for size, folder in folders.items()}
    rounds: dict[int, list[Any]] = {size: [] for size in bundles}
    for turn in range(turns):
        for size, one in bundles.items():
            say(f"turn {turn + 1} of {turns}, {size} tokens")
            rounds[size].append(measured(one, prompts, draft_tokens, new_tokens))
    rows = [row_of(size, rounds, one) for size, one in bundles.items()]
    show(rows)
    say("done")
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def prompts_of(file: Path, bundle: Path) -> list[list[int]]:
    """The prompts of a file of JSON lines, as token ids: its own, or of its texts."""
    lines = [json.loads(line) for line in file.read_text().splitlines() if line]
    file_of_words = Bundle.open(bundle).tokenizer
    ids = []
    for line in lines:
        if "token_ids" not in line:
            words = Tokenizer.from_file(str(file_of_words))
            line["token_ids"] = words.encode(line["prompt"]).ids
        ids.append(line["token_ids"])
    return ids


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table."""
    heads = ("N", "weights MB", "draft ms", "acceptance", "by position")
    heads += ("tokens/pass", "tokens/s", "over plain", "same texts")
    click.echo("| " + " | ".join(heads) + " |")
    click.echo("| " + " | ".join(["---"] * len(heads)) + " |")
    for row in rows:
        places = " ".join(f"{share:.2f}" for share in row["by_position"])
        click.echo(
            f"| {row['draft_vocab']} | {row['weights_mb']} | {row['draft_ms']:.2f} "
            f"| {row['acceptance']:.3f} | {places} | {row['tokens_per_pass']:.2f} "
            f"| {row['tokens_per_second']:.1f} | {row['over_plain']:.2f}x "
            f"| {'yes' if row['same_texts'] else 'NO'} |"
        )


def row_of(count: int, rounds: dict[int, list[Any]], bundle: Bundle) -> dict[str, Any]:
    """The medians of one bundle's rounds."""
    own, plain = rounds[count], next(iter(rounds.values()))[0]["texts"]
    entry = bundle.graphs[DRAFTER]
    return {
        "draft_vocab": count,
        "recipe": Recipe.from_json(entry.quantization).name,
        "weights_mb": round(bundle.files[f"{entry.file}.data"]["bytes"] / 1e6, 1),
        **{
            name: round(statistics.median(r[name] for r in own), 3)
            for name in (
                "draft_ms",
                "acceptance",
                "tokens_per_pass",
                "tokens_per_second",
                "over_plain",
            )
        },
        "by_position": [round(x, 3) for x in own[0]["by_position"]],
        "same_texts": all(r["texts"] == plain for r in own),
    }


if __name__ == "__main__":
    main()
