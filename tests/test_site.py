"""The site of the documents, and that a link which leads nowhere is an error."""

import re
import shutil
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[1]
HOOK = "deploy/site/pages.py"


def built(root, output):
    """Build the site of a repository, as scripts/site does."""
    file = str(root / "mkdocs.yml")
    config = load_config(file, site_dir=str(output), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return output


@pytest.fixture
def repository(tmp_path):
    """A small repository with the real settings and the real hook."""
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
