from __future__ import annotations

import pytest

from tools.recipes.picture import Panel, draw_points

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
