"""The lines and the picture of a report, on figures written by hand."""

import numpy as np
import pytest

import jetdraft
from tools.recipes.bars import bars
from tools.recipes.picture import Panel, draw_points
from tools.recipes.quality import Quality, compare
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


def test_what_is_alone_is_not_compared():
    for rows, lines in (
        ([row("none", 8, 0.0, 1.0, (1.0,) * 4)], []),
        (
            [row("int4-rtn-b32", 100, 0.04, 0.9, (4.0,) * 4)],
            ["best int4: int4-rtn-b32"],
        ),
    ):
        assert bars(Report("t", None, "x", rows)) == lines


POINTS = {
    "small": (0.1, 100.0),
    "beaten": (0.2, 120.0),
    "exact": (0.01, 400.0),
    "as good": (0.1, 100.0),
    "middle": (0.05, 200.0),
    "larger": (0.05, 210.0),
}


@pytest.mark.parametrize(
    ("rises", "front"),
    [(False, [(0.01, 400.0), (0.05, 200.0), (0.1, 100.0)]), (True, [(0.01, 400.0)])],
)
def test_the_front_has_the_points_that_no_point_beats(rises, front):
    assert Panel("MB", POINTS, rises).front() == front


def test_a_picture_names_each_point_once(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn = []
    save = figure.savefig
    monkeypatch.setattr(
        figure,
        "savefig",
        lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)),
    )
    panels = [Panel("MB", POINTS, False), Panel("speed-up", POINTS, True)]
    draw_points(tmp_path / "front.png", panels, "mean KL")
    (picture,) = drawn
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == list(POINTS)
    labels = [axes.get_xlabel() for axes in picture.axes]
    assert labels == ["mean KL (log scale)"] * 2
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_kl_top_1_and_perplexity_of_two_distributions():
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], np.float32)) + 3
    q = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], np.float32)) - 7
    quality = Quality()
    quality.add(p, q, [1])
    first = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert quality.kl_mean == pytest.approx(first / 2, abs=1e-6)
    assert quality.kl_p99 == pytest.approx(0.99 * first, abs=1e-6)
    assert quality.top1_agreement == 0.5
    assert quality.perplexity == pytest.approx(2.0, abs=1e-5)


def test_a_model_agrees_with_itself(bundle, model):
    other = jetdraft.load(bundle, threads=1)
    windows = [list(range(1, 100)), [5, 6, 7]]
    quality = compare(model.parts.target, other.parts.target, windows)
    assert quality.kl_mean == 0.0
    assert quality.top1_agreement == 1.0
    assert quality.counted == 98 + 2
    assert model.parts.target.cache.length == 0
