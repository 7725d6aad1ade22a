"""What a report comes down to, in a line for each question that it answers."""

from __future__ import annotations

import statistics

from jetdraft.bench.report import FULL, Report

PLAIN = "int4-rtn-b32"
"""What the other int4 recipes have to beat."""


def bars(report: Report) -> list[str]:
    """The lines, as far as the report has the recipes that they take.

    bars(comparison.run(print))
    """
    return [*_int4(report), *_int8(report), *_drafters(report)]


def _int4(report: Report) -> list[str]:
    """The best in the bytes of plain rounding, two in a hundred more at most."""
    rows = [row for row in report.rows if row.recipe.startswith("int4-")]
    plain = next((row for row in rows if row.recipe == PLAIN), None)
    if plain is None:
        return []
    fitting = [row for row in rows if row.bytes <= 1.02 * plain.bytes]
    best = min(fitting, key=lambda row: row.kl_mean)
    one, four = (best.relative[width] / plain.relative[width] for width in (1, 4))
    return [
        f"best int4: {best.recipe}, {best.kl_mean / plain.kl_mean:.2f} of the KL of "
        f"{PLAIN} in {best.bytes / plain.bytes:.2f} of its bytes, {one:.2f}x as fast "
        f"at 1 row, {four:.2f}x at 4"
    ]


def _int8(report: Report) -> list[str]:
    rows = [row for row in report.rows if row.recipe.startswith("int8-")]
    if not rows:
        return []
    best = max(rows, key=lambda row: row.top1_agreement)
    kept = f"{best.top1_agreement:.4f}"
    return [f"best int8: {best.recipe}, the same best token in {kept} of places"]


def _drafters(report: Report) -> list[str]:
    """Mean acceptance over all targets, against that of the drafter's floats."""
    accepted: dict[str, list[float]] = {}
    for pair in report.pairs:
        accepted.setdefault(pair.drafter, []).append(pair.acceptance_rate)
    means = {name: statistics.mean(rates) for name, rates in accepted.items()}
    full = means.pop(FULL.name, 0.0)
    return [
        f"drafter {name}: acceptance {mean:.3f}, {mean - full:+.3f} to its floats"
        for name, mean in means.items()
    ]
