"""What a cut of the drafter's vocabulary gives: draft time, acceptance, tokens/s.

    python benchmarks/draft_vocab.py BUNDLE TARGET DRAFTER --calibration TEXT \
        --prompts code.jsonl --counts 32768,8192 -w /tmp/cuts --json FILE

BUNDLE is the exported pair of the checkpoints TARGET and DRAFTER. For each count its
drafter is exported again, cut as `jetdraft export --draft-vocab COUNT` cuts it; the
target's graphs stay. Bundles run in turns, greedy; the median over the turns is shown.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

import jetdraft
from jetdraft.bundle import DRAFTER, TARGET, Bundle
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.exporter import _cut, _cut_job, _job, _write_graphs
from jetdraft.export.measures import Measures
from jetdraft.manifest import MANIFEST
from jetdraft.recipe import Recipe

PASSES = 40


def cut_bundle(
    bundle: Bundle,
    target: Checkpoint,
    source: str,
    text: Path,
    count: int,
    folder: Path,
) -> Bundle:
    """The bundle with a drafter that chooses among `count` tokens."""
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
            DRAFTER: replace(entry.contract, draft_vocab=count),
        },
        options,
        lambda *state: None,
    )
    cut = _cut(measures)
    assert cut is not None
    job = _cut_job(_job(folder, DRAFTER, cut.checkpoint, measures), cut)
    graphs = {**bundle.graphs, DRAFTER: _write_graphs(job)}
    made = replace(bundle, path=folder, graphs=graphs, files={})
    made.save()
    return Bundle.open(folder)


def measured(bundle: Bundle, prompts: list[list[int]], k: int, new: int) -> Any:
    """Milliseconds of a draft step, and the figures of the texts."""
    with jetdraft.load(bundle.path, threads=2) as model:
        drafter = model.parts.drafter
        assert drafter is not None
        times = []
        for _ in range(PASSES):
            before = drafter.seconds
            drafter.run([100])
            times.append(1e3 * (drafter.seconds - before))
        stats = None
        texts = []
        for prompt in prompts:
            result = model.generate(
                token_ids=prompt,
                method="draft",
                num_draft_tokens=k,
                max_new_tokens=new,
                ignore_eos=True,
            )
            texts.append(result.token_ids)
            if stats is None:
                stats = result.stats
            else:
                stats.merge(result.stats)
        assert stats is not None
        return {
            "draft_ms": statistics.median(times),
            "tokens_per_second": stats.tokens_per_second,
            "acceptance": stats.acceptance_rate,
            "by_position": stats.accepted_by_position,
            "tokens_per_pass": stats.tokens_per_pass,
            "texts": texts,
        }


@click.command()
@click.argument("bundle", type=Path)
@click.argument("target")
@click.argument("drafter")
@click.option("--calibration", type=Path, required=True)
@click.option("--prompts", "files", type=Path, multiple=True, required=True)
@click.option("--counts", default="65536,32768,8192")
@click.option("-w", "--work", type=Path, required=True)
@click.option("-k", "--draft-tokens", default=3)
@click.option("-n", "--new-tokens", default=64)
@click.option("--turns", default=2)
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
    output: Path | None,
) -> None:
    """Measure BUNDLE and its cut versions."""
    whole = Bundle.open(bundle)
    checkpoint = Checkpoint.load(target, torch.float32)
    bundles = {whole.target.contract.vocab_size: whole}
    for count in map(int, counts.split(",")):
        folder = work / str(count)
        bundles[count] = cut_bundle(
            whole, checkpoint, drafter, calibration, count, folder
        )
        click.echo(f"exported {count}", err=True)
    del checkpoint
    lines = [line for f in files for line in f.read_text().splitlines() if line]
    prompts = [json.loads(line)["token_ids"] for line in lines]
    rounds: dict[int, list[Any]] = {count: [] for count in bundles}
    for _ in range(turns):
        for count, one in bundles.items():
            rounds[count].append(measured(one, prompts, draft_tokens, new_tokens))
            row = row_of(count, rounds, one)
            click.echo(f"measured {json.dumps(row)}", err=True)
    rows = [row_of(count, rounds, bundles[count]) for count in bundles]
    for row in rows:
        click.echo(json.dumps(row))
    if output is not None:
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


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
            )
        },
        "by_position": [round(x, 3) for x in own[0]["by_position"]],
        "same_texts": all(r["texts"] == plain for r in own),
    }


if __name__ == "__main__":
    main()
