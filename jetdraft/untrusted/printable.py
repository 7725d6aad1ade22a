"""Text of strangers in messages: one line that cannot steer a terminal."""

from __future__ import annotations


def printable(text: object, most: int = 200) -> str:
    r"""The text as one line of at most `most` characters, safe to show.

    Line ends, control and escape characters, lone surrogates, invisible characters and
    those that turn the direction of writing are shown as Python writes them. A
    longer text ends with "…".

    printable("a\x1b[2Jb\n")    # 'a\\x1b[2Jb\\n'
    """
    # No character becomes shorter, so what lies further behind is not shown anyway.
    line = "".join(map(_shown, str(text)[: most + 1]))
    return line if len(line) <= most else line[: most - 1] + "…"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")
