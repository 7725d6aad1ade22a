"""jetdraft and its peers on the same checkpoints, prompts and threads, in turns.

Every round runs each contender once, one process after the other; the table gives
medians over the rounds. Peak memory is of one more process for each way to decode. Each
peer runs in an environment of its own, see benchmarks/peers/README.md.

    python benchmarks/compare.py --bundle pair --target TARGET --drafter DRAFTER \
        --prompts everyday.jsonl --gguf target.gguf --drafter-gguf drafter.gguf \
        --peer genai=/tmp/genai/bin/python --peer llamacpp=/tmp/llama/bin/python \
        --json benchmarks/results/compare.json
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

HERE = Path(__file__).parent
PEERS = {
    "genai": ("onnxruntime-genai int4 b32", "genai.py"),
    "openvino": ("OpenVINO GenAI int4 b128", "openvino_peer.py"),
    "llamacpp": ("llama.cpp", "llamacpp.py"),
}


@dataclass(frozen=True)
class Setup:
    """What all contenders share."""

    bundle: tuple[Path, ...]
    target: Path
    drafter: Path | None
    prompts: Path
    gguf: Path | None
    drafter_gguf: Path | None
    threads: int
    methods: str
    num_draft_tokens: str
    max_new_tokens: int
    temperature: float
    peer: tuple[str, ...]


def commands(setup: Setup) -> dict[str, list[str]]:
    """The command of one round of each contender; the report's file is added to it."""
    common = [
        "--prompts", str(setup.prompts), "--threads", str(setup.threads),
        "--max-new-tokens", str(setup.max_new_tokens), "--repeats", "1",
        "--temperature", str(setup.temperature),
    ]  # fmt: skip
    how = {
        f"jetdraft {bundle.name}": [
            sys.executable, "-m", "jetdraft", "bench", str(bundle), *common,
            "--methods", setup.methods, "--lengths", setup.num_draft_tokens, "--output",
        ]
        for bundle in setup.bundle
    }  # fmt: skip
    pair = ["--target", str(setup.target), "--num-draft-tokens", setup.num_draft_tokens]
    if setup.drafter is not None:
        pair += ["--drafter", str(setup.drafter)]
    for peer in setup.peer:
        key, _, python = peer.partition("=")
        name, script = PEERS[key]
        more = []
        if key == "llamacpp":
            more += ["--gguf", str(setup.gguf)]
            if setup.drafter_gguf is not None:
                more += ["--drafter-gguf", str(setup.drafter_gguf)]
        file = str(HERE / "peers" / script)
        how[name] = [python, file, *pair, *common, *more, "--json"]
    return how


def measure(command: list[str]) -> dict[str, Any]:
    """Run one contender once and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        subprocess.run([*command, str(file)], check=True)
        report: dict[str, Any] = json.loads(file.read_text())
    return report


def label(row: dict[str, Any]) -> str:
    """How a row is decoded, in words that both kinds of report share."""
    method = row["method"].replace("plain", "none")
    exact = "" if row.get("exact", True) else " (no-exact)"
    length = f" {row['num_draft_tokens']}" if row["num_draft_tokens"] else ""
    return f"{method}{length}{exact}"


def peak_bytes(
    commands: dict[str, list[str]], reports: dict[str, list[dict[str, Any]]]
) -> dict[tuple[str, str], int]:
    """The peak memory of each contender and method, in a process of its own."""
    peaks: dict[tuple[str, str], int] = {}
    for name, rounds in reports.items():
        for method in dict.fromkeys(row["method"] for row in rounds[0]["rows"]):
            click.echo(f"memory: {name}, {method}", err=True)
            *command, output = commands[name]
            # Of an option that is given twice, the last counts.
            command += ["--methods", method, "--max-new-tokens", "16"]
            peaks[name, method] = measure([*command, output])["peak_memory_bytes"]
    return peaks


def summarize(
    reports: dict[str, list[dict[str, Any]]], peaks: dict[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """One row per contender and method, with the median speed over the rounds."""
    rows = []
    for name, rounds in reports.items():
        for turns in zip(*(r["rows"] for r in rounds), strict=True):
            row = turns[0]
            same = row.get("same_text", row.get("same_text_as_plain"))
            of = row.get("texts", row.get("of_prompts"))
            speeds = [turn["tokens_per_second"] for turn in turns]
            first = statistics.median(turn["time_to_first_token"] for turn in turns)
            load = statistics.median(r.get("load_seconds") or 0.0 for r in rounds)
            by_prompt = np.median([turn["by_prompt"] for turn in turns], axis=0)
            rows.append(
                {
                    "tool": name,
                    "method": label(row),
                    "tokens_per_second": statistics.median(speeds),
                    "by_round": speeds,
                    "by_prompt": by_prompt.tolist(),
                    "tokens_per_pass": row.get("tokens_per_pass"),
                    "same_text": f"{same} of {of}",
                    "first_seconds": first,
                    "load_seconds": load,
                    "peak_mb": peaks.get((name, row["method"]), 0) / 1e6,
                }
            )
    return rows


def show(rows: list[dict[str, Any]], passes: dict[str, dict[str, float]]) -> None:
    """A Markdown table, and the pass-time curves."""
    click.echo("\n| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        click.echo("| " + " | ".join(map(_cell, row.values())) + " |")
    click.echo("\npass ms by width")
    for name, curve in passes.items():
        click.echo(f"{name:24} " + " ".join(f"{w}:{ms:.1f}" for w, ms in curve.items()))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{number:.0f}" for number in value)
    return f"{value:.2f}" if isinstance(value, float) else str(value or "-")


@click.command()
@click.option("--bundle", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--target", type=click.Path(path_type=Path), required=True)
@click.option("--drafter", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--gguf", type=click.Path(path_type=Path), help="TARGET for llama.cpp.")
@click.option("--drafter-gguf", type=click.Path(path_type=Path))
@click.option("--threads", default=2, show_default=True)
@click.option("--methods", default="none,draft,lookup,auto", show_default=True)
@click.option("--num-draft-tokens", default="4", show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--memory/--no-memory", default=True, help="Measure peak memory too.")
@click.option("--peer", multiple=True, help=f"NAME=PYTHON, of {', '.join(PEERS)}.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(rounds: int, memory: bool, output: Path | None, **options: Any) -> None:
    """Measure our bundles and the peers in turns."""
    setup = Setup(**options)
    reports: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name, command in commands(setup).items():
            click.echo(f"round {number + 1}: {name}", err=True)
            try:
                reports.setdefault(name, []).append(measure(command))
            except subprocess.CalledProcessError as error:
                click.echo(f"{name} ended with {error.returncode}", err=True)
    reports = {name: found for name, found in reports.items() if found}
    peaks = peak_bytes(commands(setup), reports) if memory else {}
    rows = summarize(reports, peaks)
    passes = {
        name: found[0]["pass_ms"].get("target", found[0]["pass_ms"])
        for name, found in reports.items()
    }
    show(rows, passes)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        first = [found[0] for found in reports.values()]
        fields = {
            "machine": next((r["machine"] for r in first if "machine" in r), None),
            "versions": {
                name: found[0].get("versions") or found[0]["version"]
                for name, found in reports.items()
            },
            "setup": {key: _plain(value) for key, value in options.items()},
            "rows": rows,
            "pass_ms": passes,
            "rounds": rounds,
        }
        output.write_text(json.dumps(fields, indent=2) + "\n")


def _plain(value: Any) -> Any:
    """An option as JSON has it: files by their names, environments without paths."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return value.name
    return value.partition("=")[0] if isinstance(value, str) else value


if __name__ == "__main__":
    main()
