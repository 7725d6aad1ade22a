"""Exports of tests: small buffers, and nothing is measured unless a test asks."""

from pathlib import Path
from typing import Any

from jetdraft.bundle import Bundle
from jetdraft.export.exporter import ExportOptions, export
from jetdraft.recipe import Recipe


def exported(
    source: str | Path,
    output: Path,
    recipe: str = "none",
    drafter: str | Path | None = None,
    head: str | Path | None = None,
    drafter_recipe: str = "none",
    **options: Any,
) -> Bundle:
    """The bundle of a checkpoint, with integers in blocks of 32 where it has any."""
    recipes = Recipe.parse(recipe, 32), Recipe.parse(drafter_recipe, 32)
    sizes = {"capacity": 64, "max_width": 16, "fast": True}
    settings = ExportOptions(*recipes, **{**sizes, **options})
    own, beside = (str(path) if path else None for path in (drafter, head))
    return export(str(source), output, own, settings, head=beside)
