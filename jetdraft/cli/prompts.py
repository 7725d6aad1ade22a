"""Prompts from arguments, standard input and files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from jetdraft.runtime.drafts.arrays import Int64s
from jetdraft.runtime.model import Model

DEFAULT_PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\nclass Config:\n    def __init__(self, path):\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for i in range(10):\n    for j in range(10):\n        if",
)


MAX_INPUT_CHARS = 64_000_000
"""Of an input that is read at once; a device or a pipe may never end."""


def read_input(file: Path | None) -> str:
    """Return the text of a file, or of standard input; raises `UsageError`."""
    if file is None:
        return _read("standard input", lambda: sys.stdin.read(MAX_INPUT_CHARS + 1))
    return _read(f"{file}", lambda: _text_of(file))


def read_line() -> str | None:
    """Return the next line of standard input, None at its end; as `read_input`."""
    line = _read(
        "a line of standard input", lambda: sys.stdin.readline(MAX_INPUT_CHARS + 1)
    )
    return line.removesuffix("\n") if line else None


def _read(name: str, read: Callable[[], str]) -> str:
    try:
        text = read()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"cannot read {name} ({error}); give UTF-8 text"
        ) from error
    if len(text) > MAX_INPUT_CHARS:
        raise click.UsageError(
            f"{name} has more than {MAX_INPUT_CHARS} characters; give less text"
        )
    return text


def _text_of(file: Path) -> str:
    with file.open(encoding="utf-8") as handle:
        return handle.read(MAX_INPUT_CHARS + 1)


def read_prompt(text: str | None, file: Path | None) -> str:
    """Return the prompt: `text`, standard input if it is "-", or the text of `file`.

    Raises `UsageError` unless exactly one of the two was given.
    """
    if (text is None) == (file is None):
        raise click.UsageError("give either --prompt or --prompt-file")
    return text if text is not None and text != "-" else read_input(file)


def read_prompts(file: Path | None, model: Model) -> list[Int64s]:
    """Return the prompts in a file of JSON lines, each as int64 [tokens].

    Each line has either "prompt" or "token_ids". Without a file the prompts are
    `DEFAULT_PROMPTS`, or random ids if the bundle has no tokenizer.
    """
    if file is not None:
        lines = _lines(file)
        if not lines:
            raise click.UsageError(f"there are no prompts in {file}; give at least one")
        return [_parse(line, model) for line in lines]
    if model.bundle.tokenizer is not None:
        return [model.prompt(text) for text in DEFAULT_PROMPTS]
    random = np.random.default_rng(0)
    contract = model.bundle.target.contract
    size = min(32, contract.capacity // 2)
    return [random.integers(0, contract.vocab_size, size) for _ in DEFAULT_PROMPTS]


def _lines(file: Path) -> list[str]:
    # Not splitlines: JSON text may contain other line separators unescaped.
    return [line for line in read_input(file).split("\n") if line.strip()]


def _parse(line: str, model: Model) -> Int64s:
    try:
        fields = json.loads(line)
        text, ids = fields.get("prompt"), fields.get("token_ids")
    except (ValueError, AttributeError, RecursionError) as error:
        raise click.UsageError(
            f"not a prompt: {line[:60]!r}; each line is a JSON object with prompt or "
            "token_ids"
        ) from error
    if text is not None and not isinstance(text, str):
        raise click.UsageError(f"not a prompt: {line[:60]!r}; prompt must be text")
    return model.prompt(text, ids)
