"""Long contexts with selected KV rows: time and bytes per token, retrieval, acceptance.

    python benchmarks/retrieval.py BUNDLE --tokens 4096,16384 --prompts 2 --json FILE

BUNDLE comes of `jetdraft export --select-kv N`. A prompt is lines of keys with values,
and then asks for the value of one key. Each prompt is read once with all rows, and each
way continues it: plain decoding with all rows, drafts of selected rows that all rows
verify, and selected rows alone. The last way, `lossy`, reads the prompt with selected
rows too. Bytes are those of keys and values that attention and votes read.
`--blank` reads no prompt: it times passes over buffers of noise. Times are those of a
processor on one thread, so that other programs disturb them less.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

import jetdraft
from jetdraft.contracts.selection import Reading
from jetdraft.contracts.step_contract import StepContract
from jetdraft.runtime.model import Model
from jetdraft.runtime.passes.graph import Graph

DRAFTED, DIGITS = 4, 5


def prompt_of(model: Model, tokens: int, seed: int) -> tuple[list[int], str]:
    """A prompt of about that many tokens, and the value that it asks for."""
    draw = random.Random(seed)
    line = "The value of key {} is {}.\n"

    def number() -> str:
        return str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))

    one = len(model.parts.text.encode(line.format(number(), number())))
    pairs = {number(): number() for _ in range(tokens // one)}
    key = draw.choice(list(pairs))
    text = "".join(line.format(*pair) for pair in pairs.items())
    ids = model.parts.text.encode(f"{text}\nThe value of key {key} is")
    return ids[-tokens:], pairs[key]


def row_bytes(contract: StepContract) -> int:
    """The bytes of a row's keys and values in all layers."""
    return sum(2 * 4 * heads * size for heads, size in contract.kv_shapes)


def rows_of(graph: Graph) -> list[Any]:
    """Copies of the rows that each layer has selected."""
    buffers = graph.selected.buffers.items()
    return [b.numpy().copy() for n, b in buffers if n.startswith("past_rows")]


def selecting(model: Model, prompt: list[int], count: int) -> dict[str, Any]:
    """Plain decoding with selected rows, over a prompt that was read with all rows."""
    target = model.parts.target
    graph, start = target.beside(), len(prompt) - 1
    graph.prepare(exact=False, reading=Reading.TURNED)
    target.cache.rewind(start)
    token, tokens, seconds, votes = prompt[-1], [], [], 0
    for _ in range(count):
        before = rows_of(graph)
        begin = time.process_time()
        token = int(graph.run([token], last_only=True).candidates[0, 0])
        seconds.append(time.process_time() - begin)
        graph.cache.advance(1)
        tokens.append(token)
        pairs = zip(before, rows_of(graph), strict=True)
        votes += sum(not np.array_equal(*pair) for pair in pairs)
    target.cache.rewind(start)
    contract = graph.contract
    assert contract.selection is not None
    share = votes / count / len(contract.kv_shapes)
    read = contract.selection.rows + share * len(prompt) / 2  # a vote reads keys only
    return {
        "text": model.parts.text.decode(tokens),
        "ms": 1e3 * statistics.median(seconds),
        "votes": share,
        "kv_bytes": read * row_bytes(contract),
    }


def ways(model: Model, prompt: list[int], count: int) -> Iterator[dict[str, Any]]:
    """What each way writes after a prompt, and what it costs."""
    whole = len(prompt) * row_bytes(model.bundle.target.contract)
    fields: dict[str, Any] = {"token_ids": prompt, "max_new_tokens": count}
    fields |= {"exact": False, "ignore_eos": True}

    def row(name: str, kv_bytes: float, **own: Any) -> dict[str, Any]:
        """Milliseconds count from the second piece on."""
        stream = model.stream(**fields, **own)
        begin, first, reading, text = time.process_time(), 0, 0.0, ""
        for piece in stream:
            text += piece.text
            if not first:
                reading = time.process_time() - begin
                begin, first = time.process_time(), len(piece.token_ids)
        stats = stream.stats
        spent = time.process_time() - begin
        return {
            "way": name,
            "text": text,
            "ms": 1e3 * spent / max(stats.new_tokens - first, 1),
            "reading_seconds": reading,
            "kv_bytes": kv_bytes,
            "acceptance": stats.acceptance_rate,
            "tokens_per_pass": stats.tokens_per_pass,
            "reused": stats.reused_tokens,
        }

    yield row("all", whole, method="none")
    drafter = row("drafter", 0.0, method="select", num_draft_tokens=DRAFTED)
    selected = selecting(model, prompt, count)
    read = whole + DRAFTED * selected["kv_bytes"]
    yield drafter | {"kv_bytes": read / drafter["tokens_per_pass"]}
    yield {"way": "selected", **selected}
    yield row(
        "lossy", selected["kv_bytes"], method="none", drafting={"select_kv": True}
    )


def blank(model: Model, length: int, passes: int = 12) -> dict[str, Any]:
    """Milliseconds of passes of one row over `length` rows of noise."""
    target = model.parts.target
    noise = np.random.default_rng(0)
    rows = {
        name: noise.standard_normal((heads, length, size), dtype=np.float32)[None]
        for layer, (heads, size) in enumerate(target.contract.kv_shapes)
        for name in (f"past_key.{layer}", f"past_value.{layer}")
    }
    target.cache.restore(rows, length)
    graph = target.beside()

    def median(run: Callable[[int], object]) -> float:
        seconds = []
        for token in range(passes + 2):
            begin = time.process_time()
            run(token)
            seconds.append(time.process_time() - begin)
        return 1e3 * statistics.median(seconds[2:])

    def vote(token: int) -> None:
        graph.selected.forget()
        graph.run([7])

    row = {
        "way": "blank",
        "tokens": length,
        "ms_all": median(lambda token: target.run([7])),
        "ms_all_5_rows": median(lambda token: target.run([7] * (1 + DRAFTED))),
        "ms_vote": median(vote),
        "ms_selected": median(lambda token: graph.run([7])),
    }
    target.cache.rewind(0)
    model.forget()
    return row


@click.command()
@click.argument("bundle", type=Path)
@click.option("--tokens", default="4096")
@click.option("--prompts", default=1)
@click.option("--count", default=24, help="New tokens of a text.")
@click.option("--blank", "is_blank", is_flag=True)
@click.option("--json", "file", type=Path)
def main(
    bundle: Path,
    tokens: str,
    prompts: int,
    count: int,
    is_blank: bool,
    file: Path | None,
) -> None:
    """Print a line for each way and length, and write all results."""
    model = jetdraft.load(bundle, threads=1)
    report: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        report.append(row)
        click.echo(json.dumps(row))
        if file is not None:
            file.write_text(json.dumps(report, indent=1) + "\n")

    for length in map(int, tokens.split(",")):
        if is_blank:
            add(blank(model, length))
            continue
        for seed in range(prompts):
            prompt, value = prompt_of(model, length, seed)
            model.forget()
            for row in ways(model, prompt, count):
                right = row["text"].strip().startswith(value)
                add({"tokens": len(prompt), "seed": seed, "right": right, **row})


if __name__ == "__main__":
    main()
