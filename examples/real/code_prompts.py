"""Prompts to learn code from: functions of Python's library, without their bodies.

    python examples/real/code_prompts.py -o code/train.jsonl

writes lines of `messages` that ask for a whole function, given its signature and its
docstring, as a test of HumanEval does. The target writes the answers while `jetdraft
train draft` trains.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import click

from jetdraft.files import replacing

TASK = "Complete this Python function. Answer with the whole function.\n\n{}"
LEAST, MOST = 60, 800
"""Letters of a docstring: a shorter one does not say what is asked for, and a longer
one takes the place of the answer."""

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def stubs(file: Path) -> Iterator[str]:
    """The functions of a file that have a docstring, each without its body."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list:
            continue
        text = ast.get_docstring(node)
        if text is None or not LEAST <= len(text) <= MOST:
            continue
        node.body = node.body[:1]
        yield ast.unparse(node)


def library() -> list[str]:
    """The stubs of Python's library, in the order of its files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        stub
        for file in sorted(root.rglob("*.py"))
        if not SKIPPED & set(file.relative_to(root).parts)
        for stub in stubs(file)
    ]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    help="Prompts at most.",
)
@click.option("--seed", default=7, show_default=True)
def main(output: Path, count: int, seed: int) -> None:
    """Write prompts for a model of code."""
    texts = library()
    random.Random(seed).shuffle(texts)
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as partial, partial.open("w", encoding="utf-8") as file:
        for text in texts[:count]:
            message = {"role": "user", "content": TASK.format(text)}
            file.write(json.dumps({"messages": [message]}) + "\n")
    click.echo(f"{min(count, len(texts))} prompts of {len(texts)} functions", err=True)


if __name__ == "__main__":
    main()
