"""Methods and draft lengths that run in turns, and their times as ratios.

contenders("none,draft:3,auto")    # draft:3 drafts three tokens in every round
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from jetdraft import Stats

Figures = dict[str, float]
Measure = Callable[..., tuple[Figures, list[list[int]]]]
"""Runs all inputs with the options of a generation: figures, tokens of each text."""


def contenders(names: str) -> dict[str, dict[str, Any]]:
    """The options of a generation by the name of its contender."""
    options: dict[str, dict[str, Any]] = {}
    for name in names.split(","):
        method, _, count = name.partition(":")
        length = {"num_draft_tokens": int(count)} if count else {}
        options[name] = {"method": method, **length}
    return options


def figures_of(stats: Stats) -> Figures:
    """What a table shows of the sums over all texts of a turn."""
    return {
        "decode_seconds": stats.decode_seconds,
        "tokens_per_pass": stats.tokens_per_pass or 0.0,
        "acceptance_rate": stats.acceptance_rate or 0.0,
        "drafted_tokens": stats.drafted_tokens,
        "new_tokens": stats.new_tokens,
        "target_passes": stats.target_passes,
    }


def in_turns(
    options: dict[str, dict[str, Any]], measure: Measure, turns: int
) -> dict[str, dict[str, Any]]:
    """A row for each contender: medians over the turns; the first turn warms up.

    `X_speedup` of a time X is the ratio to the first contender in the same turn.
    """
    runs: dict[str, list[Figures]] = {name: [] for name in options}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(turns + 1):
        for name, chosen in options.items():
            figures, tokens = measure(**chosen)
            assert texts.setdefault(name, tokens) == tokens, f"{name} changed its text"
            if turn:
                runs[name].append(figures)
    first = next(iter(options))
    rows: dict[str, dict[str, Any]] = {}
    for name, results in runs.items():
        row = {key: statistics.median(r[key] for r in results) for key in results[0]}
        for key in [key for key in row if key.endswith("seconds")]:
            pairs = zip(runs[first], results, strict=True)
            ratios = [one[key] / other[key] for one, other in pairs]
            row[f"{key}_speedup"] = statistics.median(ratios)
            row[f"{key}_speedups"] = ratios
        row["same_text"] = texts[name] == texts[first]
        rows[name] = row
    return rows


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the table on the screen."""
    shown = {k: v for k, v in row.items() if not isinstance(v, list)}
    return f"{name:8} " + "  ".join(f"{k} {v:.3g}" for k, v in shown.items())
