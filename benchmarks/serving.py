"""What a server adds: one client's tokens per second against the model asked directly.

    python benchmarks/serving.py BUNDLE --prompts PROMPTS

Each prompt is answered by turns in this process and by `jetdraft serve` in another,
streamed, with the same options; texts are compared. The ratio is of whole requests,
from asking to the last token, and of decoding alone, as `jetdraft bench` counts it.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click
import httpx

import jetdraft
from jetdraft.runtime.model import Model

PAUSE = 0.2
"""Seconds for which the threads of the other process may go on spinning."""


def direct(model: Model, body: dict) -> tuple[str, float, float]:
    """The text, and tokens per second: of all, and of decoding."""
    options = {name: body[name] for name in ("temperature", "seed", "method")}
    started = time.perf_counter()
    stream = model.stream(
        body["prompt"], max_new_tokens=body["max_tokens"], ignore_eos=True, **options
    )
    text, arrivals = "", []
    for piece in stream:
        text += piece.text
        arrivals.append((time.perf_counter(), len(piece.token_ids)))
    return text, *_speeds(started, arrivals)


def served(client: httpx.Client, body: dict) -> tuple[str, float, float]:
    """The same of a streamed answer."""
    started = time.perf_counter()
    text, arrivals = "", []
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            text += choice["text"]
            arrivals.append((time.perf_counter(), len(choice.get("tokens", []))))
    return text, *_speeds(started, arrivals)


def _speeds(started: float, arrivals: list[tuple[float, int]]) -> tuple[float, float]:
    arrivals = [(at, count) for at, count in arrivals if count]
    (first, begun), (last, _) = arrivals[0], arrivals[-1]
    total = sum(count for _, count in arrivals)
    return total / (last - started), (total - begun) / (last - first)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--methods", default="none,auto", show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(
    bundle: Path,
    prompts: Path,
    max_new_tokens: int,
    repeats: int,
    methods: str,
    temperature: float,
    file: Path | None,
) -> None:
    """Print a table, and write it to a file if asked."""
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    model = jetdraft.load(bundle)
    command = [sys.executable, "-m", "jetdraft", "serve", str(bundle), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--name", "m"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    address = re.search(r"http://\S+", process.stderr.readline())
    assert address is not None
    rows, differing = [], 0
    with httpx.Client(base_url=address[0], timeout=600) as client:
        for method in methods.split(","):
            found: dict[str, list[tuple[float, float]]] = {"direct": [], "served": []}
            for _ in range(1 + repeats):
                for prompt in texts:
                    body = {
                        "model": "m", "prompt": prompt, "temperature": temperature,
                        "seed": 1, "method": method, "max_tokens": max_new_tokens,
                        "ignore_eos": True, "stream": True, "include_drafted": True,
                    }  # fmt: skip
                    time.sleep(PAUSE)
                    one, *ours = direct(model, body)
                    time.sleep(PAUSE)
                    other, *theirs = served(client, body)
                    differing += one != other
                    found["direct"].append((ours[0], ours[1]))
                    found["served"].append((theirs[0], theirs[1]))
            # The first time around is for both to learn.
            kept = {name: pairs[len(texts) :] for name, pairs in found.items()}
            row: dict[str, object] = {"method": method}
            for place, what in enumerate(("request", "decoding")):
                speeds = {
                    name: statistics.median(pair[place] for pair in pairs)
                    for name, pairs in kept.items()
                }
                ratios = [
                    s[place] / d[place]
                    for s, d in zip(kept["served"], kept["direct"], strict=True)
                ]
                row[what] = {**speeds, "ratio": statistics.median(ratios)}
            rows.append(row)
            click.echo(json.dumps(row))
    process.terminate()
    process.wait()
    result = {"texts": len(texts), "differing": differing, "rows": rows}
    click.echo(f"{differing} texts differ")
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
