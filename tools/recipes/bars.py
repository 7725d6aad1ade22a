"""Answers the questions about recipes from a report, a line for each question."""

from __future__ import annotations

import statistics

from tools.recipes.report import FULL, Report

PLAIN = "int4-rtn-b32"
"""The recipe that the other int4 recipes have to beat."""


def bars(report: Report) -> list[str]:
    """A line for each question that the report's recipes can answer.

    bars(comparison.run(print))
    """
    return [*_int4(report), *_int8(report), *_drafters(report)]


def _int4(report: Report) -> list[str]:
    """The best int4 recipe with at most 1.02 times the bytes of plain rounding."""
    rows = [row for row in report.rows if row.recipe.startswith("int4-")]
    plain = next((row for row in rows if row.recipe == PLAIN), None)
    if plain is None:
        return []
    fitting = [row for row in rows if row.bytes <= 1.02 * plain.bytes]
    best = min(fitting, key=lambda row: row.kl_mean)
    if best is plain:
        return [f"best int4: {PLAIN}"]
    # How many times as fast as plain rounding, in passes of 1 and of 4 rows.
    one, four = (best.relative[width] / plain.relative[width] for width in (1, 4))
    return [
        f"best int4: {best.recipe}, {best.kl_mean / plain.kl_mean:.2f} of the KL of "
        f"{PLAIN} in {best.bytes / plain.bytes:.2f} of its bytes, {one:.2f}x as fast "
        f"at 1 row, {four:.2f}x at 4"
    ]


def _int8(report: Report) -> list[str]:
    """The int8 recipe that chooses the unquantized model's best token most often."""
    rows = [row for row in report.rows if row.recipe.startswith("int8-")]
    if not rows:
        return []
    best = max(rows, key=lambda row: row.top1_agreement)
    share = f"{best.top1_agreement:.4f}"
    return [f"best int8: {best.recipe}, the same best token in {share} of places"]


def _drafters(report: Report) -> list[str]:
    """The mean acceptance of each drafter, and the difference from its floats."""
    accepted: dict[str, list[float]] = {}
    for pair in report.pairs:
        accepted.setdefault(pair.drafter, []).append(pair.acceptance_rate)
    means = {name: statistics.mean(rates) for name, rates in accepted.items()}
    full = means.pop(FULL.name, 0.0)
    return [
        f"drafter {name}: acceptance {mean:.3f}, {mean - full:+.3f} to its floats"
        for name, mean in means.items()
    ]
