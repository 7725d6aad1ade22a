"""jetdraft and its peers on the same checkpoints, prompts and threads, in turns.

Every round runs each contender once, one process after the other, so that a noisy
minute hits all of them; the table gives medians over the rounds. Peers run in their own
environment (`--peer-python`), see benchmarks/peers/README.md.

    python benchmarks/compare.py --target /tmp/target-400m \
        --drafter examples/pycode/drafter --prompts examples/pycode/prompts.jsonl \
        --peer-python /tmp/peers-venv/bin/python --json benchmarks/results/compare.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent
PEERS: dict[str, list[str]] = {
    "onnxruntime-genai b32": ["genai.py", "--block-size", "32"],
    "OpenVINO GenAI int4": ["openvino_peer.py"],
}


@dataclass(frozen=True)
class Setup:
    """What all contenders share."""

    target: Path
    drafter: Path
    prompts: Path
    threads: int
    num_draft_tokens: str
    max_new_tokens: int
    peer_python: Path | None
    work: Path


def bundle(setup: Setup, block_size: int) -> Path:
    """Our int4 bundle of the pair, exported if it is not there."""
    output = setup.work / f"bundle-b{block_size}"
    if not output.exists():
        click.echo(f"exporting {output}", err=True)
        subprocess.run(
            [
                sys.executable, "-m", "jetdraft", "export", str(setup.target),
                "--drafter", str(setup.drafter), "--output", str(output),
                "--block-size", str(block_size),
            ],
            check=True,
        )  # fmt: skip
    return output


def commands(setup: Setup) -> dict[str, list[str]]:
    """The command of one round of each contender; the report's file is added to it."""
    common = [
        "--prompts", str(setup.prompts), "--threads", str(setup.threads),
        "--max-new-tokens", str(setup.max_new_tokens), "--repeats", "1",
    ]  # fmt: skip
    lengths = setup.num_draft_tokens
    found = {
        f"jetdraft b{size}": [
            sys.executable, "-m", "jetdraft", "bench", str(bundle(setup, size)),
            *common, "--lengths", lengths, "--output",
        ]
        for size in (32, 128)
    }  # fmt: skip
    if setup.peer_python is None:
        return found
    pair = ["--target", str(setup.target), "--drafter", str(setup.drafter)]
    for name, (script, *options) in PEERS.items():
        file = str(HERE / "peers" / script)
        how = [*pair, *common, "--num-draft-tokens", lengths, *options, "--json"]
        found[name] = [str(setup.peer_python), file, *how]
    return found


def measure(command: list[str]) -> dict[str, Any]:
    """Run one contender once and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        subprocess.run([*command, str(file)], check=True)
        report: dict[str, Any] = json.loads(file.read_text())
    return report


def label(row: dict[str, Any]) -> str:
    """How a row is decoded, in words that both kinds of report share."""
    method = {"plain": "none"}.get(row["method"], row["method"])
    exact = "" if row.get("exact", True) else " (no-exact)"
    length = f" {row['num_draft_tokens']}" if row["num_draft_tokens"] else ""
    return f"{method}{length}{exact}"


def summarize(reports: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per contender and method, with the median speed over the rounds."""
    rows = []
    for name, rounds in reports.items():
        for row, *others in zip(*(r["rows"] for r in rounds), strict=True):
            same = row.get("same_text", row.get("same_text_as_plain"))
            of = row.get("texts", row.get("of_prompts"))
            speeds = [r["tokens_per_second"] for r in (row, *others)]
            rows.append(
                {
                    "tool": name,
                    "method": label(row),
                    "tokens_per_second": statistics.median(speeds),
                    "by_round": speeds,
                    "tokens_per_pass": row.get("tokens_per_pass"),
                    "same_text": f"{same} of {of}",
                }
            )
    return rows


def show(rows: list[dict[str, Any]], passes: dict[str, dict[str, float]]) -> None:
    """A Markdown table, and the pass-time curves."""
    click.echo("\n| tool | method | tokens/s | by round | tokens/pass | same text |")
    click.echo("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        rounds = " ".join(f"{speed:.0f}" for speed in row["by_round"])
        per_pass = f"{row['tokens_per_pass']:.2f}" if row["tokens_per_pass"] else "-"
        click.echo(
            f"| {row['tool']} | {row['method']} | {row['tokens_per_second']:.1f} "
            f"| {rounds} | {per_pass} | {row['same_text']} |"
        )
    click.echo("\npass ms by width")
    for name, curve in passes.items():
        click.echo(f"{name:24} " + " ".join(f"{w}:{ms:.1f}" for w, ms in curve.items()))


@click.command()
@click.option("--target", type=click.Path(path_type=Path), required=True)
@click.option("--drafter", type=click.Path(path_type=Path), required=True)
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--num-draft-tokens", default="1,2,3,4", show_default=True)
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--peer-python", type=click.Path(path_type=Path))
@click.option("--work", type=click.Path(path_type=Path), default=HERE / "cache")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(rounds: int, output: Path | None, **options: Any) -> None:
    """Measure jetdraft at blocks 32 and 128, and the peers, in turns."""
    setup = Setup(**options)
    setup.work.mkdir(parents=True, exist_ok=True)
    reports: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name, command in commands(setup).items():
            click.echo(f"round {number + 1}: {name}", err=True)
            reports.setdefault(name, []).append(measure(command))
    rows = summarize(reports)
    passes = {
        name: found[0]["pass_ms"].get("target", found[0]["pass_ms"])
        for name, found in reports.items()
    }
    show(rows, passes)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        fields = {"rows": rows, "pass_ms": passes, "rounds": rounds}
        output.write_text(json.dumps(fields, indent=2) + "\n")


if __name__ == "__main__":
    main()
