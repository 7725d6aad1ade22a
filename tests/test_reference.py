"""The site of the documents, and its reference of the Python API."""

import re
import shlex
import shutil
from pathlib import Path

import pdoc
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
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
    assert 'href="jetdraft/export.html"' in (pages / "jetdraft.html").read_text()
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


ROOT = Path(__file__).parents[1]
HOOK = "deploy/site/pages.py"


def built(root, output):
    config = load_config(str(root / "mkdocs.yml"), site_dir=str(output), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return output


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    for folder in ("docs", "deploy/site", "figures", "build/reference"):
        (root / folder).mkdir(parents=True)
    settings = (ROOT / "mkdocs.yml").read_text()
    (root / "mkdocs.yml").write_text(settings.partition("nav:\n")[0])
    shutil.copy(ROOT / HOOK, root / HOOK)
    (root / "README.md").write_text("# First\n\n[page](docs/page.md#part)\n")
    (root / "docs/page.md").write_text(
        "# Page\n\n## Part\n\n[first](../README.md) [all](../figures) "
        "[figure](../figures/a.json)\n"
    )
    (root / "figures/a.json").write_text("{}")
    (root / "build/reference/jetdraft.html").write_text("<p>reference</p>")
    return root


def links(page):
    return re.findall(r'href="([^"#:]+\.(?:html|json)[^"]*)"', page.read_text())


def test_links_lead_out_of_the_documents(repository, tmp_path):
    site = built(repository, tmp_path / "site")
    assert "docs/page.html#part" in links(site / "index.html")
    shown = links(site / "docs/page.html")
    assert {"../index.html", "../figures/index.html", "../figures/a.json"} <= {*shown}
    assert "a.json" in links(site / "figures/index.html")
    assert (site / "figures/a.json").read_text() == "{}"
    assert (site / "reference/jetdraft.html").exists()


@pytest.mark.parametrize(
    "link", ["docs/nothing.md", "docs/page.md#nothing", "nothing.json", "nothing"]
)
def test_a_link_that_leads_nowhere_is_an_error(repository, tmp_path, link):
    (repository / "README.md").write_text(f"# First\n\n[broken]({link})\n")
    with pytest.raises(Abort):
        built(repository, tmp_path / "site")
