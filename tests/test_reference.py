"""What scripts/reference writes."""

from __future__ import annotations

import re
from pathlib import Path

import pdoc
import pytest
from pdoc.doc import Class, Function, Module

import jetdraft

SCRIPT = Path(__file__).parents[1] / "scripts" / "reference"
MODULES = re.findall(r"(?<= )jetdraft[.\w]*", SCRIPT.read_text())


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("jetdraft", jetdraft.__all__),
        ("jetdraft", ["Model.generate", "Stream.cancel", "Stats.tokens_per_pass"]),
        ("jetdraft/errors", ["JetdraftError", "OptionError"]),
        ("jetdraft/export/exporter", ["export", "ExportOptions.capacity"]),
        ("jetdraft/recipe", ["Recipe.parse"]),
    ],
)
def test_public_names_are_shown(pages, page, names):
    shown = (pages / f"{page}.html").read_text()
    assert [name for name in names if f'id="{name}"' not in shown] == []


def test_everything_that_can_be_called_has_a_docstring():
    # pdoc leaves out the docstrings that dataclasses make up.
    public = [Module(jetdraft).get(name) for name in jetdraft.__all__]
    methods = [
        member
        for one in public
        if isinstance(one, Class)
        for member in one.own_members
        if isinstance(member, Function) and not member.name.startswith("_")
    ]
    assert methods
    assert [one.fullname for one in public + methods if not one.docstring] == []
