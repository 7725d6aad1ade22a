"""Heads, a drafter model, streams, lookup and `auto`: all over one target, in one run.

    jetdraft export examples/pycode/target --drafter examples/pycode/drafter -o pair
    jetdraft export examples/pycode/target --head examples/pycode/head -o with-head
    python benchmarks/heads.py --prompts examples/pycode/prompts.jsonl --json OUT \
        --bundle drafter draft pair --bundle eagle3 eagle with-head

"planned" leaves the lengths and trees of drafts to their method, or to the controller.
Every way decodes a prompt before the next prompt, at T = 0 and 0.8. Speed-ups are over
plain decoding at width 1 in the same bundle, since pages of memory differ. `draft ms`
is the time of one drafted token, and `outside ms` what a round spends outside sessions.
A bundle has a row: chains of K = 1 to 5, whose positions and `draft ms` are those of
the longest chain and whose tokens per second those of the fastest; then tokens a pass
and speed-up of other ways. Run nothing beside.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft import Stats
from jetdraft.runtime.measured.stats import Round
from jetdraft.runtime.planning.registry import methods

TEMPERATURES = (0.0, 0.8)
LENGTHS = (1, 2, 3, 4, 5)
LOOKUP = 4
TREE = 7
SEED = 1

ROUNDS: list[Round] = []
"""The rounds of the generation under way."""


def keep_rounds() -> None:
    """Keep every round that is counted, also those of fixed lengths."""
    add = Stats.add

    def kept(stats: Stats, round_: Round, committed: int) -> None:
        ROUNDS.append(round_)
        add(stats, round_, committed)

    Stats.add = kept


@dataclass
class Row:
    """A way to decode, and what came of it."""

    name: str
    model: jetdraft.Model
    options: dict[str, Any]
    stats: Stats | None = None
    draft_ms: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def run(self, prompt: str, **more: Any) -> None:
        """Decode one prompt; the model forgets what the way before taught it."""
        self.model.forget()
        ROUNDS.clear()
        result = self.model.generate(prompt, **self.options, **more)
        self.outputs.append(result.token_ids)
        if self.stats is None:
            self.stats = result.stats
        else:
            self.stats.merge(result.stats)
        self.draft_ms += [
            1e3 * round_.draft_seconds / round_.drafted
            for round_ in ROUNDS
            if round_.drafted
        ]


def ways(name: str, model: jetdraft.Model, method: str, looks_up: bool) -> list[Row]:
    """The ways of one bundle, whose drafter's method is `method`; plain ones first.

    A device whose branching passes are not exact gets no tree. If its passes with
    probes are not exact, the method that reads probes runs without exactness.
    """
    widths = model.parts.widths
    exact = widths.probes_agree or not methods()[method].reads_probes
    options: dict[str, dict[str, Any]] = {
        "plain, width 1": {"method": "none", "exact": False},
        "plain": {"method": "none"},
    }
    for length in LENGTHS:
        options[f"K = {length}"] = {
            "method": method,
            "num_draft_tokens": length,
            "exact": exact,
        }
    if widths.trees_agree:
        options[f"tree of {TREE}"] = {
            "method": method,
            "num_draft_tokens": TREE,
            "drafting": {"tree": "best"},
            "exact": exact,
        }
    options["planned"] = {"method": method, "exact": exact}
    if looks_up:
        how = {"method": "lookup", "num_draft_tokens": LOOKUP}
        options[f"lookup, K = {LOOKUP}"] = how
    options["auto"] = {"method": "auto"}
    return [Row(f"{name}: {way}", model, how) for way, how in options.items()]


def figures(row: Row, narrow: Row, plain: Row) -> dict[str, Any]:
    """The figures of a way; `narrow` is plain decoding at width 1."""
    stats, reference = row.stats, narrow.stats
    assert stats is not None
    assert reference is not None
    return {
        "way": row.name,
        "exact": row.options.get("exact", True),
        "tokens_per_pass": stats.tokens_per_pass,
        "accepted_by_position": stats.accepted_by_position,
        "draft_ms": statistics.median(row.draft_ms) if row.draft_ms else None,
        "outside_ms_per_round": stats.outside_ms_per_round,
        "tokens_per_second": stats.tokens_per_second,
        "speed_up": (stats.tokens_per_second or 0) / (reference.tokens_per_second or 1),
        "same_text": sum(
            a == b for a, b in zip(row.outputs, plain.outputs, strict=True)
        ),
        "texts": len(row.outputs),
    }


def measured(groups: list[list[Row]], prompts: list[str], **how: Any) -> list[Any]:
    """Run all ways on each prompt in turn; gives the figures of each way."""
    steps = [(prompt, row) for prompt in prompts for ways in groups for row in ways]
    for ways in groups:
        for row in ways:  # the first generation of each way measures passes
            row.model.generate(prompts[0], max_new_tokens=8, **row.options)
    with click.progressbar(steps, file=sys.stderr) as bar:
        for prompt, row in bar:
            row.run(prompt, ignore_eos=True, **how)
    return [figures(row, ways[0], ways[1]) for ways in groups for row in ways]


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table with a row for each bundle."""
    names = ("drafts from", "plain, exact", "tokens/pass", "right by position")
    names += ("draft ms", "over plain", "tokens/s", "outside ms", f"tree of {TREE}")
    names += ("planned", "auto", "same texts")
    click.echo("| " + " | ".join(names) + " |")
    click.echo("| " + " | ".join(["---"] * len(names)) + " |")
    bundles: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        name, way = row["way"].split(": ")
        bundles.setdefault(name, {})[way] = row
    for name, ways in bundles.items():
        show_row(name, [ways[f"K = {length}"] for length in LENGTHS], ways)
    lookup = bundles[next(iter(bundles))].get(f"lookup, K = {LOOKUP}")
    if lookup:
        show_row(f"lookup, K = {LOOKUP}", [lookup], {})


def show_row(
    name: str, chains: list[dict[str, Any]], ways: dict[str, dict[str, Any]]
) -> None:
    """Print a row: chains by length, then the other ways of their bundle."""
    last, every = chains[-1], [*chains, *ways.values()]
    others = [
        f"{ways[way]['tokens_per_pass']:.2f}, {ways[way]['speed_up']:.2f}x"
        if way in ways
        else ""
        for way in (f"tree of {TREE}", "planned", "auto")
    ]
    cells = [
        name,
        f"{ways['plain']['speed_up']:.2f}x" if ways else "",
        " ".join(f"{row['tokens_per_pass']:.2f}" for row in chains),
        " ".join(f"{rate:.2f}" for rate in last["accepted_by_position"][:5]),
        "" if last["draft_ms"] is None else f"{last['draft_ms']:.2f}",
        " ".join(f"{row['speed_up']:.2f}" for row in chains),
        f"{max(row['tokens_per_second'] for row in chains):.0f}",
        " ".join(f"{row['outside_ms_per_round']:.2f}" for row in chains),
        *others,
        f"{min([r['same_text'] for r in every if r['exact']] or [0])} of "
        f"{last['texts']}",
    ]
    click.echo("| " + " | ".join(cells) + " |")


@click.command()
@click.option(
    "--bundle",
    "bundles",
    nargs=3,
    multiple=True,
    required=True,
    metavar="NAME METHOD FOLDER",
    help="A bundle, its name in the table and the method of its drafter.",
)
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=8, show_default=True, help="Prompts to take.")
@click.option("--max-new-tokens", default=96, show_default=True)
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundles: tuple[tuple[str, str, str], ...],
    prompts: Path,
    count: int,
    max_new_tokens: int,
    output: Path | None,
) -> None:
    """Measure bundles of one target."""
    lines = prompts.read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["prompt"] for line in lines]
    keep_rounds()
    models = [(name, jetdraft.load(path), method) for name, method, path in bundles]
    report: dict[str, Any] = {"machine": models[0][1].parts.profiles.machine}
    for temperature in TEMPERATURES:
        how = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        groups = [
            ways(*model, looks_up=number == 0) for number, model in enumerate(models)
        ]
        rows = measured(groups, texts, seed=SEED, **how)
        click.echo(f"\nT = {temperature}\n")
        show(rows)
        report[f"T={temperature}"] = rows
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
