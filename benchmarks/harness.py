"""Ways to decode that take turns on the same prompts, and what came of each way.

    ways = [Way("plain", model, PLAIN), Way("auto", model, {"method": "auto"})]
    alternate(ways, read_prompts(file), max_new_tokens=96)
    rows = [way.figures(plain=ways[0], narrow=ways[0]) for way in ways]

Every way decodes a prompt before the next prompt, so that a noisy minute hits all of
them. All figures that are compared are ratios inside one run. Run nothing beside.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import jetdraft
from jetdraft import Result, Stats
from jetdraft.runtime.measured.stats import Round

PLAIN = {"method": "none"}
"""Plain decoding, whose text all exact methods write."""

WIDTH_1 = {"method": "none", "exact": False}
"""The fastest plain decoding, in passes of one row."""

Prompt = Mapping[str, Any]
"""`prompt` or `token_ids`, as `generate` takes them."""

_rounds: list[Round] = []


def keep_rounds() -> None:
    """Let ways know the times of each round's draft, also at fixed lengths."""
    add = Stats.add

    def kept(stats: Stats, round_: Round, committed: int) -> None:
        _rounds.append(round_)
        add(stats, round_, committed)

    Stats.add = kept


def read_prompts(file: Path, count: int | None = None) -> list[Prompt]:
    """The first `count` prompts of a file of JSON lines."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    names = ("prompt", "token_ids")
    return [{k: v for k, v in json.loads(line).items() if k in names} for line in lines]


@dataclass
class Way:
    """Options of `generate`, and the results on each prompt."""

    name: str
    model: jetdraft.Model
    options: Mapping[str, Any]
    results: list[Result] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)

    def run(self, prompt: Prompt, **more: Any) -> None:
        """Decode one prompt; the model forgets what the way before taught it."""
        self.model.forget()
        _rounds.clear()
        started = time.perf_counter()
        self.results.append(self.model.generate(**prompt, **self.options, **more))
        self.request_seconds.append(time.perf_counter() - started)
        drafts = [round_ for round_ in _rounds if round_.drafted]
        self.draft_ms += [1e3 * r.draft_seconds / r.drafted for r in drafts]

    @property
    def stats(self) -> Stats:
        """The sum over all results."""
        total = Stats(str(self.options["method"]), exact=True, prompt_tokens=0)
        for result in self.results:
            total.merge(result.stats)
        return total

    def figures(self, plain: Way, narrow: Way) -> dict[str, Any]:
        """The metrics of the way, beside exact plain decoding and the fastest one."""
        stats, speed = self.stats, self.stats.tokens_per_second or 0.0
        seconds = statistics.mean(self.request_seconds)
        pairs = zip(self.results, plain.results, strict=True)
        return {
            "way": self.name,
            **{k: v for k, v in self.options.items() if k != "drafting"},
            "exact": self.options.get("exact", True),
            "tokens_per_pass": stats.tokens_per_pass,
            "acceptance_rate": stats.acceptance_rate,
            "accepted_by_position": stats.accepted_by_position,
            "tokens_per_second": speed,
            "over_plain": speed / (plain.stats.tokens_per_second or 1.0),
            "over_width_1": speed / (narrow.stats.tokens_per_second or 1.0),
            "draft_ms": statistics.median(self.draft_ms) if self.draft_ms else None,
            "outside_ms_per_round": stats.outside_ms_per_round,
            "request_seconds": seconds,
            "request_over_plain": statistics.mean(plain.request_seconds) / seconds,
            "same_text": sum(one.token_ids == other.token_ids for one, other in pairs),
            "texts": len(self.results),
        }


def alternate(
    ways: Sequence[Way], prompts: Sequence[Prompt], repeats: int = 1, **how: Any
) -> None:
    """Run all ways on a prompt before the next; the first run of each is a warm-up."""
    for way in ways:
        warm = {**how, "max_new_tokens": 8}
        way.model.generate(**prompts[0], **way.options, **warm)
    steps = [(p, way) for _ in range(repeats) for p in prompts for way in ways]
    with click.progressbar(steps, file=sys.stderr) as bar:
        for prompt, way in bar:
            way.run(prompt, **how)


def show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print a Markdown table whose columns are the keys of its rows."""
    names = list(rows[0])
    click.echo(f"\n{title}\n\n| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        click.echo(f"| {' | '.join(str(row[name]) for name in names)} |")


def write(report: Mapping[str, Any], file: Path | None) -> None:
    """Write a report as JSON, if there is a file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
