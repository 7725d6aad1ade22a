"""The lines of a report, on figures written by hand."""

from __future__ import annotations

from tools.recipes.bars import bars
from tools.recipes.report import PairFigures, Report, TargetFigures


def row(recipe, size, kl, top1, times):
    relative = dict(zip((1, 2, 4, 8), times, strict=True))
    return TargetFigures(recipe, size, 0.0, kl, 0.0, top1, 0.0, {}, relative)


def test_each_line_has_the_best_comparable_recipe():
    rows = [
        row("none", 800, 0.0, 1.0, (1.0, 1.0, 1.0, 1.0)),
        row("int8-rtn-b32", 200, 0.001, 0.99, (2.0, 2.0, 2.0, 2.0)),
        row("int8-gptq-b32", 200, 0.001, 0.98, (2.0, 2.0, 2.0, 2.0)),
        row("int4-rtn-b32", 100, 0.04, 0.9, (4.0, 4.0, 2.0, 2.0)),
        row("int4-gptq-b128", 102, 0.01, 0.9, (5.0, 4.0, 3.0, 2.0)),
        row("int4-k_quant-b32", 103, 0.001, 0.9, (5.0, 4.0, 3.0, 2.0)),
    ]
    pairs = [
        PairFigures("none", "none", 0.8, 1.0, 1.0),
        PairFigures("none", "int4-rtn-b32", 0.77, 1.0, 1.0),
        PairFigures("int8-rtn-b32", "none", 0.7, 1.0, 1.0),
        PairFigures("int8-rtn-b32", "int4-rtn-b32", 0.71, 1.0, 1.0),
    ]
    assert bars(Report("t", "d", "x", rows, pairs)) == [
        "best int4: int4-gptq-b128, 0.25 of the KL of int4-rtn-b32 in 1.02 of its "
        "bytes, 1.25x as fast at 1 row, 1.50x at 4",
        "best int8: int8-rtn-b32, the same best token in 0.9900 of places",
        "drafter int4-rtn-b32: acceptance 0.740, -0.010 to its floats",
    ]


def test_a_report_without_comparable_recipes_has_no_lines():
    assert bars(Report("t", None, "x", [row("none", 8, 0.0, 1.0, (1.0,) * 4)])) == []


def test_plain_rounding_is_not_compared_with_itself():
    rows = [row("int4-rtn-b32", 100, 0.04, 0.9, (4.0,) * 4)]
    assert bars(Report("t", None, "x", rows)) == ["best int4: int4-rtn-b32"]
