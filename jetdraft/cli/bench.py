"""jetdraft bench: every method, measured against plain decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np

from jetdraft.bench import benchmark
from jetdraft.bench.energy import Meter
from jetdraft.cli.options import (
    bundle_argument,
    integers,
    runtime_options,
    sampling_options,
)
from jetdraft.devices.detection import detect
from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.model import Model, load
from jetdraft.runtime.planning.options import Options

DEFAULT_PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\nclass Config:\n    def __init__(self, path):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for i in range(10):\n    for j in range(10):\n        if",
)


@click.command("bench")
@bundle_argument
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(path_type=Path),
    help='JSON lines with "prompt" or "token_ids"; default: four short texts.',
)
@click.option("--methods", help="Comma list; default: all the bundle has, and auto.")
@click.option("--num-draft-tokens", default="1,2,3,4", show_default=True)
@click.option("--max-new-tokens", type=int, default=96, show_default=True)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Medians are over these.",
)
@sampling_options
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write a report."
)
@runtime_options
def command(
    bundle: Path,
    prompts_file: Path | None,
    methods: str | None,
    num_draft_tokens: str,
    repeats: int,
    json_file: Path | None,
    provider: str | None,
    drafter_provider: str | None,
    threads: int | None,
    streams: Path | None,
    **options: Any,
) -> None:
    """Compare the methods of BUNDLE, prompt by prompt in one process."""
    lengths = integers(num_draft_tokens, "--num-draft-tokens")
    model = load(bundle, provider, threads, streams, drafter_provider=drafter_provider)
    prompts = read_prompts(prompts_file, model)
    asked = methods.split(",") if methods else [*model.methods, "auto"]
    rows = benchmark.contenders(model, asked, lengths)
    for row in rows:  # what is out of range is refused before measuring
        Options(num_draft_tokens=row.num_draft_tokens, **options)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.UsageError(
            f"cannot write {json_file} (no such folder); choose another place"
        )
    with click.progressbar(
        length=repeats * len(prompts) * len(rows),
        label="measuring",
        file=sys.stderr,
    ) as bar:
        benchmark.run(
            model, rows, prompts, repeats, lambda: bar.update(1), Meter, **options
        )
    report = benchmark.report(model, rows)
    report["machine"]["power_mode"] = detect().power_mode
    show(report)
    if json_file is not None:
        report["options"] = {**options, "repeats": repeats, "prompts": len(prompts)}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def read_prompts(file: Path | None, model: Model) -> list[Int64s]:
    """The prompts as ids; without a file or a tokenizer, something to decode from."""
    if file is not None:
        lines = _lines(file)
        if not lines:
            raise click.UsageError(f"there are no prompts in {file}; give at least one")
        return [_read_prompt(line, model) for line in lines]
    if model.bundle.tokenizer is not None:
        return [model.prompt(text) for text in DEFAULT_PROMPTS]
    random = np.random.default_rng(0)
    contract = model.bundle.target.contract
    size = min(32, contract.capacity // 2)
    return [random.integers(0, contract.vocab_size, size) for _ in DEFAULT_PROMPTS]


def _lines(file: Path) -> list[str]:
    try:
        # Not splitlines: JSON text may hold other line separators as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"cannot read {file} ({error}); give a UTF-8 file of JSON lines"
        ) from error
    return [line for line in lines if line.strip()]


def _read_prompt(line: str, model: Model) -> Int64s:
    try:
        fields = json.loads(line)
        text, ids = fields.get("prompt"), fields.get("token_ids")
    except (ValueError, AttributeError) as error:
        raise click.UsageError(
            f"not a prompt: {line[:60]!r}; each line is a JSON object with prompt or "
            "token_ids"
        ) from error
    if text is not None and not isinstance(text, str):
        raise click.UsageError(f"not a prompt: {line[:60]!r}; prompt must be text")
    return model.prompt(text, ids)


def show(report: dict[str, Any]) -> None:
    """The report as a table, the losing rows too."""
    click.echo(
        f"{'method':8} {'K':>4} {'exact':5} {'tokens/s':>9} {'speedup':>8} "
        f"{'tok/pass':>8} {'accepted':>8} {'first s':>8} {'host ms':>8}  same text"
    )
    for row in report["rows"]:
        length = row["num_draft_tokens"] or "-"
        click.echo(
            f"{row['method']:8} {length:>4} {'yes' if row['exact'] else 'no':5} "
            f"{row['tokens_per_second']:9.1f} {_cell(row['speedup'], 2, 7)}x "
            f"{_cell(row['tokens_per_pass'], 2)} {_cell(row['acceptance_rate'], 2)} "
            f"{row['time_to_first_token']:8.3f} "
            f"{_cell(row['outside_ms_per_round'], 3)}  "
            f"{row['same_text']}/{row['texts']}"
        )
    for name, curve in report["pass_ms"].items():
        times = "  ".join(f"{width}:{ms:.2f}" for width, ms in curve.items())
        if times:
            click.echo(f"{name:8} pass ms by width  {times}")
    for row in report["rows"]:
        if row["tokens_per_joule"] is not None:
            name = f"{row['method']:8} {row['num_draft_tokens'] or '-':>4}"
            click.echo(f"{name} {row['tokens_per_joule']:9.2f} tokens/J")
    if all(row["tokens_per_joule"] is None for row in report["rows"]):
        click.echo("energy not available: no INA3221 power monitors here")
    else:
        click.echo(f"power mode {report['machine']['power_mode'] or 'unknown'}")
    click.echo(f"peak memory {report['peak_memory_bytes'] / 1e6:.0f} MB")


def _cell(value: float | None, digits: int, width: int = 8) -> str:
    """A number, or a dash for what was not measured."""
    text = "-" if value is None else f"{value:.{digits}f}"
    return f"{text:>{width}}"
