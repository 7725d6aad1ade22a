"""Heads, a drafter model, streams, lookup and `auto`: all over one target, in one run.

    jetdraft export examples/pycode/target --drafter examples/pycode/drafter -o pair
    jetdraft export examples/pycode/target --head examples/pycode/head -o with-head
    python benchmarks/heads.py --prompts examples/pycode/prompts.jsonl --json OUT \
        --bundle drafter draft pair --bundle eagle3 eagle with-head

"planned" leaves the lengths and trees of drafts to their method, or to the controller.
At T = 0 and 0.8. Speed-ups are over plain decoding at width 1 in the same bundle, since
pages of memory differ. `draft ms` is the time of one drafted token, and `outside ms`
what a round spends outside sessions. A bundle has a row: chains of K = 1 to 5, whose
positions and `draft ms` are measured on the longest chain and whose tokens per second
on the fastest; then tokens a pass and speed-up of other ways.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from harness import (
    PLAIN,
    WIDTH_1,
    Way,
    alternate,
    keep_rounds,
    read_prompts,
    show,
    write,
)

import jetdraft
from jetdraft.runtime.planning.registry import methods

TEMPERATURES = (0.0, 0.8)
LENGTHS = (1, 2, 3, 4, 5)
LOOKUP = "lookup, K = 4"
TREE_ROWS = 7
TREE = f"tree of {TREE_ROWS}"
SEED = 1


def ways(model: jetdraft.Model, method: str, looks_up: bool) -> list[Way]:
    """The ways of one bundle, whose drafter's method is `method`; plain ones first.

    A device whose branching passes are not exact gets no tree. If its passes with
    probes are not exact, the method that reads probes runs without exactness.
    """
    widths = model.parts.widths
    exact = widths.probes_agree or not methods()[method].reads_probes
    own = {"method": method, "exact": exact}
    options: dict[str, Mapping[str, Any]] = {"width 1": WIDTH_1, "plain": PLAIN}
    for length in LENGTHS:
        options[f"K = {length}"] = {**own, "num_draft_tokens": length}
    if widths.trees_agree:
        drafted = {"num_draft_tokens": TREE_ROWS, "drafting": {"tree": "best"}}
        options[TREE] = {**own, **drafted}
    options["planned"] = own
    if looks_up:
        options[LOOKUP] = {"method": "lookup", "num_draft_tokens": 4}
    options["auto"] = {"method": "auto"}
    return [Way(name, model, how) for name, how in options.items()]


def row_of(name: str, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the table: chains by length, then the other ways of their bundle."""
    chains = [ways[way] for way in ways if way.startswith(("K = ", "lookup"))]
    last, rates = chains[-1], chains[-1]["accepted_by_position"]
    same = [way["same_text"] for way in ways.values() if way["exact"]]

    def other(way: str) -> str:
        if way not in ways:
            return ""
        figures = ways[way]
        return f"{figures['tokens_per_pass']:.2f}, {figures['over_width_1']:.2f}x"

    return {
        "drafts from": name,
        "plain, exact": other("plain").partition(", ")[2],
        "tokens/pass": " ".join(f"{row['tokens_per_pass']:.2f}" for row in chains),
        "right by position": " ".join(f"{rate:.2f}" for rate in rates[:5]),
        "draft ms": "" if last["draft_ms"] is None else f"{last['draft_ms']:.2f}",
        "over width 1": " ".join(f"{row['over_width_1']:.2f}" for row in chains),
        "tokens/s": f"{max(row['tokens_per_second'] for row in chains):.0f}",
        "outside ms": " ".join(f"{r['outside_ms_per_round']:.2f}" for r in chains),
        **{way: other(way) for way in (TREE, "planned", "auto")},
        "same texts": f"{min(same, default=0)} of {last['texts']}",
    }


def table(groups: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each bundle, and a last one for lookup."""
    rows, lookup = [], {}
    for name, figures in groups.items():
        ways = {row["way"]: row for row in figures}
        if LOOKUP in ways:
            lookup = {LOOKUP: ways.pop(LOOKUP)}
        rows.append(row_of(name, ways))
    return [*rows, row_of(LOOKUP, lookup)]


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
    keep_rounds()
    models = {name: (jetdraft.load(path), method) for name, method, path in bundles}
    machine = next(iter(models.values()))[0].parts.profiles.machine
    report: dict[str, Any] = {"machine": machine}
    for temperature in TEMPERATURES:
        groups = {
            name: ways(model, method, looks_up=number == 0)
            for number, (name, (model, method)) in enumerate(models.items())
        }
        alternate(
            [way for group in groups.values() for way in group],
            read_prompts(prompts, count),
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            ignore_eos=True,
            seed=SEED,
        )
        figures = {
            name: [way.figures(plain=group[1], narrow=group[0]) for way in group]
            for name, group in groups.items()
        }
        show(f"T = {temperature}", table(figures))
        report[f"T={temperature}"] = figures
    write(report, output)


if __name__ == "__main__":
    main()
