"""Saves the cache rows of a text that many prompts begin with, and loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.errors import BundleError, OutputError
from jetdraft.files import read_arrays, replacing
from jetdraft.runtime.passes.cache import Cache

TOKENS, IDENTITY = "tokens", "identity"


def save(
    file: Path, tokens: list[int], caches: dict[str, Cache], identity: dict[str, Any]
) -> None:
    """Write the rows of `tokens` in all caches; `identity` is what the rows depend on.

    Raises `OutputError` if the file cannot be written.
    """
    arrays: dict[str, Any] = {
        TOKENS: np.array(tokens, np.int64),
        IDENTITY: np.array(json.dumps(identity, sort_keys=True)),
    }
    for owner, cache in caches.items():
        stored = cache.stored(len(tokens))
        arrays |= {f"{owner}/{name}": rows for name, rows in stored.items()}
    try:
        with replacing(file) as partial, partial.open("wb") as handle:
            np.savez(handle, **arrays)
    except OSError as error:
        raise OutputError(
            f"cannot write {file} ({error.strerror}); choose another place"
        ) from error


def load(
    file: Path, caches: dict[str, Cache], identity: dict[str, Any]
) -> tuple[list[int], bool]:
    """Put saved rows into all caches.

    Returns their tokens, and whether the file's identity equals `identity`, so that the
    rows equal to the bit what would be computed here. Raises `BundleError` for another
    file or the rows of another bundle.
    """
    refusal = BundleError(f"{file} is not a saved prefix; save it again")
    arrays = read_arrays(file, refusal)
    try:
        saved = json.loads(str(arrays[IDENTITY]))
        tokens: list[int] = arrays[TOKENS].tolist()
    except (KeyError, ValueError) as error:
        raise refusal from error
    if not isinstance(saved, dict) or saved.get("bundle") != identity["bundle"]:
        raise BundleError(
            f"{file} was saved with another bundle; save it again with this one"
        )
    shapes = {
        f"{owner}/{name}": (*buffer.shape()[:2], len(tokens), buffer.shape()[3])
        for owner, cache in caches.items()
        for name, buffer in cache.buffers.items()
    }
    if any(name not in arrays or arrays[name].shape != shapes[name] for name in shapes):
        raise refusal
    for owner, cache in caches.items():
        rows = {name: arrays[f"{owner}/{name}"] for name in cache.buffers}
        cache.restore(rows, len(tokens))
    return tokens, saved == identity
