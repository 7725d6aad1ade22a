"""The reference of the Python API that scripts/site writes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pdoc
import pytest
from pdoc.doc import Class, Function, Module

import jetdraft
from jetdraft.export import request

SCRIPT = Path(__file__).parents[1] / "scripts" / "site"
[COMMAND] = re.findall(
    r"pdoc --output-directory \S+ (.+)", SCRIPT.read_text().replace("\\\n", "")
)
MODULES = shlex.split(COMMAND)
EXPORT = "export"
"""The one public name that is a package too, with a page of its own."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("jetdraft", [name for name in jetdraft.__all__ if name != EXPORT]),
        ("jetdraft", ["Model.generate", "Stream.cancel", "Stats.tokens_per_pass"]),
        ("jetdraft/errors", ["JetdraftError", "OptionError"]),
        ("jetdraft/export/request", [EXPORT]),
        ("jetdraft/methods", ["Method", "Proposer.propose", "registered"]),
        ("jetdraft/recipe", ["Recipe.parse"]),
    ],
)
def test_public_names_are_shown(pages, page, names):
    shown = (pages / f"{page}.html").read_text()
    assert [name for name in names if f'id="{name}"' not in shown] == []


def test_the_first_page_leads_to_the_others(pages):
    first = (pages / "jetdraft.html").read_text()
    assert 'href="jetdraft/export.html"' in first
    assert "jetdraft" in MODULES
    shown = {file.relative_to(pages).with_suffix("") for file in pages.rglob("*.html")}
    assert {Path(name.replace(".", "/")) for name in MODULES if name[0] != "!"} <= shown


def test_everything_that_can_be_called_has_a_docstring():
    # pdoc leaves out the docstrings that dataclasses make up.
    names = [name for name in jetdraft.__all__ if name != EXPORT]
    public = [Module(jetdraft).get(name) for name in names]
    public.append(Module(request).get(EXPORT))
    methods = [
        member
        for one in public
        if isinstance(one, Class)
        for member in one.own_members
        if isinstance(member, Function) and not member.name.startswith("_")
    ]
    assert methods
    assert [one.fullname for one in public + methods if not one.docstring] == []
