"""jetdraft bench: compares every method with plain decoding."""

import json
import time
from pathlib import Path
from typing import Any

import click

from jetdraft.bench import benchmark
from jetdraft.cli import flags
from jetdraft.cli.command import Command, option, parse_integers
from jetdraft.cli.console import ProgressBars, read_prompts
from jetdraft.devices.detection import Meter, detect_machine
from jetdraft.runtime.model import load
from jetdraft.runtime.passes.opener import LoadOptions
from jetdraft.runtime.planning.drafting import Drafting
from jetdraft.runtime.planning.options import GenerateOptions, Options


@click.command("bench", cls=Command)
@flags.bundle_argument
@flags.prompts_option
@option(
    "measurement --methods",
    "Comma list of methods; default: all methods of the bundle, and auto.",
)
@option(
    "measurement --lengths",
    "Comma list of draft lengths, measured beside the adaptive length.",
    default="1,2,3,4",
    callback=parse_integers,
)
@option(
    "measurement --repeats",
    "Runs of each method over all prompts; the table has their medians.",
    type=click.IntRange(1),
    default=3,
)
@flags.generate_options("max_new_tokens", *flags.SAMPLING, max_new_tokens=96)
@flags.runtime_options()
@flags.json_option
@flags.report_option
def command(
    bundle: Path,
    prompts_file: Path | None,
    methods: str | None,
    lengths: tuple[int, ...],
    repeats: int,
    as_json: bool,
    output: Path | None,
    runtime: LoadOptions,
    options: GenerateOptions,
) -> None:
    """Compare the methods of BUNDLE, prompt by prompt in one process."""
    started = time.perf_counter()
    model = load(bundle, **runtime)
    load_seconds = time.perf_counter() - started
    # The defaults of `benchmark.run`, which the report shows.
    fields = GenerateOptions(temperature=0.0, seed=0) | options
    prompts = read_prompts(prompts_file, model)
    names = [*model.methods, "auto"] if methods is None else methods.split(",")
    rows = benchmark.make_contenders(model, names, lengths)
    Options.of(**fields)  # refuse bad options before measuring
    for row in rows:
        Drafting(row.method, row.num_draft_tokens)
    line = f"measuring {len(rows)} rows over {len(prompts)} prompts, {repeats} times"
    click.echo(line, err=True)
    with ProgressBars() as bars:
        tick = bars.start_stage("measure", repeats * len(prompts) * len(rows))
        benchmark.run(model, rows, prompts, repeats, tick, Meter, **fields)
    report = benchmark.make_report(model, rows)
    report["load_seconds"] = load_seconds
    report["machine"]["power_mode"] = detect_machine().power_mode
    report["options"] = {**options, **fields}
    report["options"] |= {"repeats": repeats, "prompts": len(prompts)}
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_report(report)
    if output is not None:
        flags.write_json(output, report)


def _print_report(report: dict[str, Any]) -> None:
    header = "method      K exact  tokens/s  chars/s  speedup tok/pass accepted  "
    header += "first s  host ms  same text"
    click.echo(header)
    for row in report["rows"]:
        length = row["num_draft_tokens"] or "-"
        name = f"{row['method']:8} {length:>4} {'yes' if row['exact'] else 'no':5}"
        chars, speedup = row["characters_per_second"], _cell(row["speedup"], 2, 7)
        speeds = f"{row['tokens_per_second']:9.1f} {_cell(chars, 1)} {speedup}x"
        shares = _cell(row["tokens_per_pass"], 2), _cell(row["acceptance_rate"], 2)
        first, host = row["time_to_first_token"], _cell(row["outside_ms_per_round"], 3)
        ends = f"{first:8.3f} {host}  {row['same_text']}/{row['texts']}"
        click.echo(" ".join((name, speeds, *shares, ends)))
    for name, curve in report["pass_ms"].items():
        times = "  ".join(f"{width}:{ms:.2f}" for width, ms in curve.items())
        if times:
            click.echo(f"{name:8} pass ms by width  {times}")
    for row in report["rows"]:
        if row["tokens_per_joule"] is not None:
            name = f"{row['method']:8} {row['num_draft_tokens'] or '-':>4}"
            click.echo(f"{name} {row['tokens_per_joule']:9.2f} tokens/J")
    if all(row["tokens_per_joule"] is None for row in report["rows"]):
        click.echo("energy not available: this machine has no INA3221 power monitors")
    else:
        click.echo(f"power mode {report['machine']['power_mode'] or 'unknown'}")
    click.echo(f"peak memory {report['peak_memory_bytes'] / 1e6:.0f} MB")


def _cell(value: float | None, digits: int, width: int = 8) -> str:
    text = "-" if value is None else f"{value:.{digits}f}"
    return f"{text:>{width}}"
