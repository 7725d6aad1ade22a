"""The tables of methods in the documents are those of the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetdraft.runtime.planning.registry import AUTO, NONE, methods
from jetdraft.runtime.proposers.method import MethodOptions

ROOT = Path(__file__).parents[1]


def table(file: str) -> dict[str, list[str]]:
    """The other cells of each row of a file's table of methods, by method."""
    lines = (ROOT / file).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| method | dra"))
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name.strip("`")] = cells
    return rows


@pytest.mark.parametrize("file", ["README.md", "docs/drafting.md"])
def test_every_method_has_its_summary(file):
    rows = table(file)
    assert list(rows) == [NONE, *methods(), AUTO]
    summaries = {name: method.summary for name, method in methods().items()}
    assert {name: rows[name][0] for name in methods()} == summaries


def test_every_method_has_its_own_options():
    rows = table("docs/drafting.md")
    shared = MethodOptions.option_names()
    for name, method in methods().items():
        own = [key for key in method.options.option_names() if key not in shared]
        assert rows[name][1] == ", ".join(f"`{key}`" for key in own), name
