"""Does the plan of prompt tokens keep its promise, and is it the best?

    jetdraft export prompted -o bundles/prompted
    python benchmarks/plans.py bundles/prompted --prompts examples/pycode/prompts.jsonl

Every way decodes a prompt before the next prompt. "promised" are the tokens of a
millisecond that the last plan of a prompt promises, with the times and rates of that
moment, and "slots" the rows and prompt tokens of the pass that most rounds have by it.
A plan that rests has no slots. Run nothing beside; where other work runs, `--cpu-time`
takes the time of one thread's work instead of the clock's, for the plan too.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft import Stats
from jetdraft.runtime.planning.registry import methods
from jetdraft.runtime.proposers.guessing.ppd import PromptProposer

TEMPERATURES = (0.0, 0.8)
METHOD = "ppd"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "planned": {"method": METHOD},
    "rows=1": {"method": METHOD, "drafting": {"rows": 1}},
    "rows=3 slots=12": {"method": METHOD, "drafting": {"rows": 3, "slots": 12}},
    "rows=7 slots=24": {"method": METHOD, "drafting": {"rows": 7, "slots": 24}},
    "rows=15 slots=40": {"method": METHOD, "drafting": {"rows": 15, "slots": 40}},
    "tree of 7": {
        "method": METHOD,
        "num_draft_tokens": 7,
        "drafting": {"tree": "best"},
    },
}


@dataclass
class Row:
    """A way to decode, and what came of it."""

    name: str
    stats: Stats | None = None
    promised: list[float] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)

    def run(self, model: jetdraft.Model, prompt: str, **how: Any) -> None:
        """Decode one prompt; the model forgets what the way before taught it."""
        model.forget()
        result = model.generate(prompt, ignore_eos=True, **WAYS[self.name], **how)
        if self.stats is None:
            self.stats = result.stats
        else:
            self.stats.merge(result.stats)
        self._note(model)

    def _note(self, model: jetdraft.Model) -> None:
        """Keep what the plan of this way promises, if it has a plan."""
        method, options = methods()[METHOD], WAYS[self.name].get("drafting", {})
        if WAYS[self.name]["method"] != METHOD or "tree" in options:
            return
        proposer = model.planner.proposer(method, method.options(**options))
        assert isinstance(proposer, PromptProposer)
        plan = proposer.plan(model.parts.target.contract.max_width - 1)
        promise = plan.value(proposer.costs.ms)
        plain = 1.0 / proposer.costs.ms(1, 0)
        rests = not options and promise < plain
        self.promised.append(plain if rests else promise)
        size = max(zip(plan.shares, plan.trees, strict=True))[1].size
        self.slots.append("rests" if rests else "{}+{}".format(*size))

    def figures(self, plain: Row) -> dict[str, Any]:
        """The figures of the way."""
        assert self.stats is not None
        assert plain.stats is not None
        speed, base = self.stats.tokens_per_second, plain.stats.tokens_per_second
        return {
            "way": self.name,
            "tokens_per_pass": self.stats.tokens_per_pass,
            "tokens_per_ms": (speed or 0.0) / 1e3,
            "promised": statistics.mean(self.promised) if self.promised else None,
            "slots": self.slots,
            "over_plain": (speed or 0.0) / (base or 1.0),
            "outside_ms": self.stats.outside_ms_per_round,
        }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a Markdown table."""
    click.echo(
        "| way | tokens/pass | tokens/ms | promised | over plain | outside ms | slots |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        promised = "" if row["promised"] is None else f"{row['promised']:.3f}"
        cells = [
            row["way"],
            f"{row['tokens_per_pass']:.2f}",
            f"{row['tokens_per_ms']:.3f}",
            promised,
            f"{row['over_plain']:.2f}",
            f"{row['outside_ms']:.2f}",
            " ".join(row["slots"]),
        ]
        click.echo("| " + " | ".join(cells) + " |")


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True)
@click.option("--count", default=4, show_default=True, help="Prompts to take.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--way", "names", multiple=True, default=[*WAYS], help="A way to run.")
@click.option("--cpu-time", is_flag=True, help="Time work, with one thread.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    bundle: Path,
    prompts: Path,
    count: int,
    max_new_tokens: int,
    names: tuple[str, ...],
    cpu_time: bool,
    output: Path | None,
) -> None:
    """Measure the plans of BUNDLE, exported from a checkpoint of `train ppd`."""
    lines = prompts.read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["prompt"] for line in lines]
    if cpu_time:
        time.perf_counter = time.process_time
    model = jetdraft.load(bundle, threads=1 if cpu_time else None)
    if cpu_time:
        model.parts.survey.again()  # times of the clock may be stored
    else:
        model.parts.survey.finish()
    machine = model.parts.profiles.machine
    report: dict[str, Any] = {"machine": machine, "cpu_time": cpu_time}
    report["curve"] = model.parts.curve.to_json()
    for temperature in TEMPERATURES:
        how = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": 1}
        rows = [Row(name) for name in names]
        for text in texts:
            for row in rows:
                row.run(model, text, **how)
        click.echo(f"\nT = {temperature}\n")
        report[f"T={temperature}"] = [row.figures(rows[0]) for row in rows]
        show(report[f"T={temperature}"])
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
