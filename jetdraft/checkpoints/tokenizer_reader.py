"""Reads a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import transformers
from tokenizers.models import BPE

from jetdraft.bundle import is_token_name
from jetdraft.checkpoints.folder import NO_OWN_CODE, check_folder, first_line
from jetdraft.checkpoints.gguf import is_gguf, opened_gguf
from jetdraft.checkpoints.silence import no_progress_bars, silenced
from jetdraft.errors import CheckpointError, printable


def load_tokenizer(source: str) -> Any:
    """Load the fast tokenizer, with truncation and padding off; None without files."""
    path = Path(source)
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if path.is_dir() and not any((path / name).is_file() for name in names):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **NO_OWN_CODE)
    except Exception as error:  # tokenizers raises bare exceptions
        raise CheckpointError(
            f"the tokenizer of {source} cannot be read ({first_line(error)}); check "
            "the folder or the hub id"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"the tokenizer of {source} has no tokenizer.json form; convert it first"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_tokenizer(source: str) -> str | None:
    """Return the text of a source's tokenizer.json; None without a tokenizer."""
    if is_gguf(source):
        with opened_gguf(source) as file:
            return file.tokenizer_json()
    check_folder(source)
    with silenced(logging.WARNING), no_progress_bars():
        tokenizer = load_tokenizer(source)
    return tokenizer and str(tokenizer.backend_tokenizer.to_str())


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Map the names of special tokens that a chat template may use to their texts."""
    tokens = tokenizer.special_tokens_map if tokenizer else {}
    return {name: token for name, token in tokens.items() if is_token_name(name)}


_BPE_CLEANUP_SETTING = (
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
)
"""The setting with which transformers removes spaces in the text of BPE too."""


def passed_over_settings(tokenizer: Any, ends: Collection[int]) -> Iterator[str]:
    """Yield a warning for each setting that a bundle ignores; `ends` are end ids."""
    file = "tokenizer_config.json"
    backend = tokenizer.backend_tokenizer
    if tokenizer.split_special_tokens:
        yield f"{file}: split_special_tokens True: special tokens are never split"
    # transformers ignores it for BPE, unless another flag says otherwise
    heeded = not isinstance(backend.model, BPE) or getattr(
        tokenizer, _BPE_CLEANUP_SETTING, False
    )
    if tokenizer.clean_up_tokenization_spaces and heeded:
        yield (
            f"{file}: clean_up_tokenization_spaces True: spaces before punctuation are "
            "shown"
        )
    end = tokenizer.eos_token
    if ends and end is not None and tokenizer.eos_token_id not in ends:
        yield (
            f"{file}: eos_token {printable(end, 40)}: as in transformers, the "
            "eos_token_id of generation_config.json or config.json rules"
        )


def chat_template(template: Any) -> str | None:
    """Return a chat template; of several, default and tool use as one; or None."""
    if not isinstance(template, dict):
        return template if isinstance(template, str) else None
    default, tools = template.get("default"), template.get("tool_use")
    if default is None or tools is None:
        return default
    # Jinja drops the newline after a tag, and one at the end of a template.
    tools, default = (text.removesuffix("\n") for text in (tools, default))
    return f"{{% if tools is not none %}}{tools}{{% else %}}{default}{{% endif %}}"
