"""Pictures of measurements, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetdraft.errors import OptionError, OutputError
from jetdraft.files import replacing

Points = Mapping[str, tuple[float, float]]


def draw_curves(
    file: Path,
    curves: Mapping[str, Mapping[int, float]],
    x: str,
    y: str,
    title: str = "",
) -> None:
    """Draw named curves of y over x as a PNG; the other texts label it.

    Raises `OptionError` without matplotlib, `OutputError` if `file` cannot be written.

        draw_curves(Path("curve.png"), {"chain": {1: 4.1, 2: 4.3}}, "rows", "ms")
    """
    figure = _figure(7, 4)
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker=".", label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend()
    _save(figure, file)


def draw_points(file: Path, panels: Mapping[str, Points], x: str) -> None:
    """Draw a panel of named points for each y label, x on a logarithmic scale.

    Raises the errors of `draw_curves`.

        draw_points(Path("front.png"), {"MB": {"int4": (0.02, 310.0)}}, "mean KL")
    """
    figure = _figure(6 * len(panels), 4.5)
    for place, (label, points) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(1, len(panels), place)
        for name, point in points.items():
            axes.plot(*point, "o")
            axes.annotate(name, point, fontsize=7)
        axes.set(xlabel=x, ylabel=label, xscale="log")
    _save(figure, file)


def _figure(width: float, height: float) -> Any:
    """Make an empty figure, which needs no screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "a picture needs matplotlib; pip install matplotlib"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, file: Path) -> None:
    try:
        with replacing(file) as partial:
            figure.savefig(partial, format="png")
    except (OSError, ValueError) as error:
        raise OutputError(
            f"cannot write {file} ({error}); choose another file"
        ) from error
