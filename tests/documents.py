"""The commands and programs in README.md and docs/, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
BOARD = "deploy/jetson/README.md"
PAGES = (f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))
DOCUMENTS = ["README.md", BOARD, *PAGES]
PROGRAM = re.compile(r"([A-Z_]+=\S+ )*(jetdraft|python3?|pip|scripts/\w+)\b")
SHELL, PYTHON = "shell", "python"


@dataclass(frozen=True)
class Block:
    """A block of code; `language` is empty for what is neither code nor a command."""

    place: str
    language: str
    text: str


def blocks(document: str) -> Iterator[Block]:
    for token in MarkdownIt().parse((ROOT / document).read_text()):
        if token.type in {"code_block", "fence"}:
            shell = not token.info and PROGRAM.match(token.content)
            language = SHELL if shell else token.info
            yield Block(f"{document}:{token.map[0] + 1}", language, token.content)


def commands(document: str) -> Iterator[tuple[str, list[str]]]:
    for block in blocks(document):
        if block.language == SHELL:
            for line in block.text.replace("\\\n", " ").splitlines():
                for command in re.split(r"\s&&\s", line):
                    if words := words_of(command):
                        yield block.place, words


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        del words[0]
    return words


def phrases(document: str) -> Iterator[str]:
    for token in (
        MarkdownIt("commonmark").enable("table").parse((ROOT / document).read_text())
    ):
        for child in token.children or ():
            if child.type == "code_inline":
                yield " ".join(child.content.split())
