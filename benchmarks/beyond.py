"""What a target says of a text beyond its trained length, with selected KV rows.

    jetdraft export TARGET --capacity 16384 --select-kv 1024 -o BUNDLE
    python benchmarks/beyond.py BUNDLE TEXT --tokens 12288 --json FILE

Reads the text pass by pass, once with all rows and once with selected rows, and gives
the mean loss in nats per token by place. With all rows the loss of a target rises
beyond its length; with selected rows it should not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

import jetdraft
from jetdraft.contracts.selection import Reading
from jetdraft.runtime.passes.graph import Graph


def losses(graph: Graph, tokens: list[int], width: int) -> np.ndarray[Any, Any]:
    """The loss of every token but the first, in nats."""
    graph.cache.rewind(0)
    parts = []
    for start in range(0, len(tokens) - 1, width):
        rows = tokens[start : min(start + width, len(tokens) - 1)]
        logits = graph.run(rows).logits[: len(rows)].astype(np.float64)
        graph.cache.advance(len(rows))
        right = logits[np.arange(len(rows)), tokens[start + 1 : start + 1 + len(rows)]]
        most = logits.max(axis=1)
        parts.append(np.log(np.exp(logits - most[:, None]).sum(1)) + most - right)
    graph.cache.rewind(0)
    return np.concatenate(parts)


@click.command()
@click.argument("bundle", type=Path)
@click.argument("text", type=Path)
@click.option("--tokens", default=2048, show_default=True, help="Read of the text.")
@click.option("--step", default=512, show_default=True, help="Tokens of a mean.")
@click.option("--width", default=64, show_default=True, help="Rows of a pass.")
@click.option("--json", "file", type=Path)
def main(
    bundle: Path, text: Path, tokens: int, step: int, width: int, file: Path | None
) -> None:
    """Print the mean losses, and write them."""
    with jetdraft.load(bundle) as model:
        model.parts.survey.finish()
        target = model.parts.target
        if tokens > target.contract.capacity:
            raise click.UsageError(f"{bundle} has {target.contract.capacity} KV rows")
        ids = model.parts.text.encode(text.read_text(encoding="utf-8"))[:tokens]
        whole = losses(target, ids, width)
        graph = target.beside()
        graph.prepare(exact=False, reading=Reading.TURNED)
        selected = losses(graph, ids, width)
        model.forget()
    rows = [
        {
            "bundle": bundle.name,
            "text": text.name,
            "from": start,
            "all": float(whole[start : start + step].mean()),
            "selected": float(selected[start : start + step].mean()),
        }
        for start in range(0, len(whole), step)
    ]
    for row in rows:
        click.echo("{from:>6}  all {all:.3f}  selected {selected:.3f}".format(**row))
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
