"""Pictures of measurements, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from jetdraft.errors import OptionError, OutputError
from jetdraft.files import replacing

Point = tuple[float, float]

MARKERS = "osD^v<>pPX*h"


@dataclass(frozen=True)
class Panel:
    """Points by name; a smaller x is better, and a larger y if `rises`.

    Panel("MB", {"int4": (0.02, 310.0)}, rises=False)
    """

    label: str
    points: Mapping[str, Point]
    rises: bool

    def front(self) -> list[Point]:
        """The points, by x, than which no other is as good in both."""
        sign, front = (1.0 if self.rises else -1.0), []
        best = float("-inf")
        for x, y in sorted(self.points.values(), key=lambda p: (p[0], -sign * p[1])):
            if sign * y > best:
                best = sign * y
                front.append((x, y))
        return front


def draw_points(file: Path, panels: Sequence[Panel], x: str) -> None:
    """Draw panels of named points with their fronts, x on a logarithmic scale.

    Every panel has the same names; one legend names the points, so that no two names
    overlap. Raises `OptionError` without
    matplotlib, `OutputError` if `file` cannot be written.

        draw_points(Path("front.png"), [Panel("MB", points, False)], "mean KL")
    """
    figure = _figure(5 * len(panels) + 2, 4.5)
    for panel, axes in zip(
        panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True
    ):
        axes.plot(*zip(*panel.front(), strict=True), color="0.7", zorder=0)
        for (name, point), marker in zip(
            panel.points.items(), cycle(MARKERS), strict=False
        ):
            axes.plot(*point, marker, label=name)
        axes.set(xlabel=f"{x} (log scale)", ylabel=panel.label, xscale="log")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
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
