"""Clients that talk at once, with jetdraft's server and with llama.cpp's.

Each client has a conversation of short turns below the same long system prompt. Times
are the client's. Each number of clients has its own server, of at most four slots.

    python benchmarks/serving.py --bundle pair --gguf target.gguf \
        --llama /tmp/llama/bin/python --json benchmarks/results/serving.json
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from openai import OpenAI

TURNS, MAX_TOKENS, CLIENTS, MOST_SLOTS, CONTEXT = 3, 48, (1, 4, 16), 4, 2048
RULES = "\n".join(
    f"Rule {n}: a robot that meets obstacle {n} turns by {7 * n} degrees, waits {n} s, "
    "and reports to the station before it drives on."
    for n in range(1, 19)
)
QUESTIONS = "What is rule {}?", "And which degrees belong to it?", "Write it as JSON."
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, slots, params.port = sys.argv[1], int(sys.argv[2]), 8099
params.n_parallel, params.n_ctx = slots, slots * int(sys.argv[3])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
print("at", (server := xllamacpp.Server(params)).listening_address, flush=True)
time.sleep(1e6)
"""


@contextmanager
def started(command: list[str]) -> Iterator[str]:
    """The address that a server prints."""
    with subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=-1) as process:
        assert process.stdout is not None
        try:
            lines = (line.decode().split() for line in process.stdout)
            yield next(w for words in lines for w in words if w.startswith("http:"))
        finally:
            process.terminate()


def talk(address: str, number: int) -> list[dict[str, float]]:
    """Have a conversation; each turn's tokens, and seconds to its first token."""
    client, turns = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=900), []
    messages: list[Any] = [{"role": "system", "content": RULES}]
    model = client.models.list().data[0].id
    for question in QUESTIONS[:TURNS]:
        messages.append({"role": "user", "content": question.format(number + 1)})
        start, first, text, count = time.perf_counter(), 0.0, "", 0
        for chunk in client.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0,
            stream=True, stream_options={"include_usage": True},
        ):  # fmt: skip
            text += (chunk.choices and chunk.choices[0].delta.content) or ""
            first = first or (time.perf_counter() - start if text else 0.0)
            count = chunk.usage.completion_tokens if chunk.usage else count
        messages.append({"role": "assistant", "content": text})
        turns.append({"first": first, "tokens": count})
    return turns


def measure(address: str, clients: int) -> dict[str, float]:
    """Let clients talk at once; figures over all of their turns."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        talks = list(pool.map(lambda number: talk(address, number), range(clients)))
    seconds, turns = time.perf_counter() - start, [t for talk in talks for t in talk]
    firsts = sorted(turn["first"] for turn in turns)
    return {
        "requests_per_second": len(turns) / seconds,
        "tokens_per_second": sum(turn["tokens"] for turn in turns) / seconds,
        "first_p50": statistics.median(firsts),
        "first_p99": firsts[int(0.99 * len(firsts))],
        "second_turn_p50": statistics.median(talk[1]["first"] for talk in talks),
    }


@click.command()
@click.option("--bundle", type=click.Path(exists=True), required=True)
@click.option("--gguf", type=click.Path(exists=True), required=True)
@click.option("--llama", required=True, help="A Python that has xllamacpp.")
@click.option("--json", "out", type=click.Path(path_type=Path), required=True)
def main(bundle: str, gguf: str, llama: str, out: Path) -> None:
    """Measure both servers with each number of clients."""
    rows = []
    for count in CLIENTS:
        slots = str(min(count, MOST_SLOTS))
        with tempfile.TemporaryDirectory() as prefixes:
            ours = [sys.executable, "-m", "jetdraft", "serve", bundle, "--port=0"]
            ours += ["--threads=2", "--models", slots, "--prefixes", prefixes]
            theirs = [llama, "-c", LLAMA, gguf, slots, str(CONTEXT)]
            for name, command in (("jetdraft", ours), ("llama.cpp", theirs)):
                with started(command) as address:
                    row = {"server": name, "clients": count}
                    rows.append(row | measure(address, count))
                    print(json.dumps(rows[-1]), flush=True)
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
