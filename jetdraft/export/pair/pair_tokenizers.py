"""The tokenizers of a target and its drafter, which must be one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.reading.tokenizer_reader import read_tokenizer
from jetdraft.errors import CheckpointError, PairError


def compare_tokenizers(sources: Mapping[str, str]) -> None:
    """Refuse a pair with two tokenizers before any weight is read, which takes long."""
    if DRAFTER not in sources:
        return
    try:
        tokenizers = {name: read_tokenizer(source) for name, source in sources.items()}
    except CheckpointError:
        return  # loading says it in better words
    check_tokenizers(sources, tokenizers)


def check_tokenizers(
    sources: Mapping[str, str], tokenizers: Mapping[str, str | None]
) -> None:
    """Refuse a drafter whose token ids have another meaning than the target's."""
    target, drafter = tokenizers[TARGET], tokenizers[DRAFTER]
    if target is None or drafter is None:
        return  # ids only; the vocabularies are compared by their sizes
    if _vocabulary(target) != _vocabulary(drafter):
        raise PairError(
            f"{sources[DRAFTER]} has another tokenizer than {sources[TARGET]}; choose "
            "a drafter with the same tokenizer"
        )


def _vocabulary(tokenizer: str) -> object:
    """The parts of a tokenizer.json that decide which ids a text becomes.

    Files of one tokenizer may differ in other parts: whether special tokens are in the
    vocabulary too, and how merges are written.
    """
    fields = json.loads(tokenizer, object_hook=_without_offsets)
    model = fields["model"]
    tokens, merges = model.get("vocab"), model.get("merges") or []
    if isinstance(tokens, dict):
        added = fields.get("added_tokens") or []
        tokens = tokens | {token["content"]: token["id"] for token in added}
    options = [bool(model.get(name)) for name in ("ignore_merges", "byte_fallback")]
    return [
        *(model.get("type"), tokens, options),
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        *(fields.get(key) for key in ("normalizer", "pre_tokenizer")),
    ]


def _without_offsets(fields: dict[str, Any]) -> dict[str, Any]:
    """Offsets into the text change no ids."""
    return {name: value for name, value in fields.items() if name != "trim_offsets"}
