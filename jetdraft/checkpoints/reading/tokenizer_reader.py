"""Reads a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import transformers

from jetdraft.checkpoints.gguf import is_gguf, read_gguf_tokenizer
from jetdraft.checkpoints.reading.checkpoint_folder import check_folder
from jetdraft.checkpoints.reading.loading_errors import OWN_CODE, first_line
from jetdraft.checkpoints.silence import no_progress_bars, silenced
from jetdraft.errors import CheckpointError


def load_tokenizer(source: str) -> Any:
    """The fast tokenizer; None for a checkpoint without a tokenizer."""
    path = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / name).is_file() for name in names):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **OWN_CODE)
    except Exception as error:  # tokenizers raises bare exceptions
        raise CheckpointError(
            f"the tokenizer of {source} cannot be read ({first_line(error)}); check "
            "the folder or the hub id"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer of {source} has no tokenizer.json form; convert it first"
        )
    return tokenizer


def read_tokenizer(source: str) -> str | None:
    """The text of a source's tokenizer.json; no weight is read."""
    if is_gguf(source):
        return read_gguf_tokenizer(source)
    check_folder(source)
    with silenced(logging.WARNING), no_progress_bars():
        tokenizer = load_tokenizer(source)
    return tokenizer and str(tokenizer.backend_tokenizer.to_str())


def chat_template(tokenizer: Any) -> str | None:
    """The chat template; of several, the default and beside it that for tools."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, dict):
        return template
    default, tools = template.get("default"), template.get("tool_use")
    if default is None or tools is None:
        return default
    # Jinja drops the newline after a tag, and one at the end of a template.
    tools, default = (text.removesuffix("\n") for text in (tools, default))
    return f"{{% if tools is not none %}}{tools}{{% else %}}{default}{{% endif %}}"
