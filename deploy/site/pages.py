"""mkdocs' hook: the site has the repository's pages, each under its own path.

So a link that leaves docs/ leads to the same file as on a code host. Beside the pages
the site has each file that a page links to, and the reference of the Python API.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from textwrap import indent

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from jetdraft.cli import main

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", *(f"{room}/**/*.md" for room in ("docs", "deploy", "examples")))
PAGES += ("benchmarks/**/*.md",)
BUILD = ROOT / "build"
"""scripts/site writes the reference to a folder in here."""

LINK = re.compile(r"\]\(([^)#:\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages, what they link to, and the reference."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    pages = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))
    linked = {target for page in pages for target in targets(page)}
    shown = {*pages, *(target for target in linked if target.is_file())}
    for folder in sorted(target for target in linked if target.is_dir()):
        if not (folder / "README.md").exists():
            files.append(listing(folder, config))
            shown |= {file for file in folder.iterdir() if file.is_file()}
    for file in sorted(shown):
        files.append(_file(file, ROOT, config))
    for file in sorted(BUILD.glob("reference/**/*.*")):
        files.append(_file(file, BUILD, config))
    files.append(File.generated(config, "commands.md", content=commands()))
    return files


def commands() -> str:
    """The page with the help of each command, which comes from the option fields."""
    lines, rest = ["# Commands", "", "    jetdraft --help", ""], [("jetdraft", main)]
    for name, command in rest:
        context = click.Context(command, info_name=name, max_content_width=100)
        if isinstance(command, click.Group):
            verbs = command.list_commands(context)
            own = map(partial(command.get_command, context), verbs)
            rest += [(f"{name} {each.name}", each) for each in own if each]
        help_text = indent(command.get_help(context), "    ")
        lines += [f"## {name}", "", help_text, ""]
    return "\n".join(lines)


def targets(page: Path) -> Iterator[Path]:
    """The files and folders of the repository to which a page links."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / link).resolve()
        if target.exists() and target.is_relative_to(ROOT):
            yield target


def listing(folder: Path, config: MkDocsConfig) -> File:
    """A page with the names of the files in a folder."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    lines = [f"# {folder.name}", "", *(f"- [{name}]({name})" for name in names)]
    place = (folder / "README.md").relative_to(ROOT)
    return File.generated(config, place.as_posix(), content="\n".join(lines))


def _file(path: Path, root: Path, config: MkDocsConfig) -> File:
    place = path.relative_to(root).as_posix()
    return File(place, str(root), config.site_dir, config.use_directory_urls)


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Let links to folders lead to the pages of the folders."""
    folder = (ROOT / page.file.src_uri).parent

    def whole(link: re.Match[str]) -> str:
        if (folder / link[1]).is_dir():
            return f"]({link[1].rstrip('/')}/README.md"
        return link[0]

    return LINK.sub(whole, markdown)
