"""The rows of an earlier text that a target's buffers still hold."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jetdraft.contracts.tensors import WIDEST, Float32s, Int64s
from jetdraft.errors import BundleError, refusing
from jetdraft.files import read_arrays, write_arrays
from jetdraft.parsing import read_json
from jetdraft.runtime.passes.answer import Target
from jetdraft.runtime.passes.buffers import KEPT, Cache

# Names of arrays in a saved prefix beside the rows; `WAITING`: unread features.
TOKENS, IDENTITY, DIGEST = "tokens", "identity", "sha256"
WAITING = "waiting"


class Prefix:
    """The tokens whose rows are in a target's buffers since its last generation."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.forget()

    def forget(self) -> None:
        """Record no rows, so that the next prompt is read from its beginning."""
        self._tokens: Int64s = np.zeros(0, np.int64)
        self._exact = False
        self._passes = -1

    def reusable_rows(self, prompt: Sequence[int], exact: bool) -> int:
        """How many rows of a prompt may stay, never its last; 0 after other runs."""
        if self.target.passes != self._passes or (exact and not self._exact):
            return 0
        common = min(common_length(self._tokens, prompt), len(prompt) - 1)
        return self.target.cache.resumable(common)

    def record(self, sequence: Sequence[int], exact: bool) -> None:
        """Record that the first tokens of a sequence have the committed rows."""
        self._tokens = np.asarray(sequence[: self.target.cache.length], np.int64)
        self._exact = exact
        self._passes = self.target.passes


def common_length(one: Sequence[int] | Int64s, other: Sequence[int] | Int64s) -> int:
    """How many items at the beginning of both sequences are equal."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if len(differ) else length


def save_prefix(
    file: Path,
    tokens: list[int],
    caches: dict[str, Cache],
    identity: dict[str, Any],
    waiting: Float32s | None = None,
) -> None:
    """Write the rows of `tokens` from all caches, which must hold them, to an npz file.

    `identity` says what they depend on, `waiting` float32 [1, w] are features of the
    target that a head has not read yet. Raises `OutputError`.
    """
    arrays: dict[str, Any] = {
        TOKENS: np.array(tokens, np.int64),
        IDENTITY: np.array(json.dumps(identity, sort_keys=True)),
    }
    for owner, cache in caches.items():
        stored = cache.copy_rows(len(tokens))
        arrays |= {f"{owner}/{name}": rows for name, rows in stored.items()}
    if waiting is not None:
        arrays[WAITING] = waiting
    write_arrays(file, {**arrays, DIGEST: np.array(digest_of(arrays))})


def digest_of(arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    """The SHA-256 of all arrays but `DIGEST`: their names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays.keys() - {DIGEST}):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def load_prefix(
    file: Path, caches: dict[str, Cache], identity: dict[str, Any], size: int = 0
) -> tuple[list[int], bool, Float32s | None]:
    """Put saved rows into all caches, in place of their rows.

    Returns the tokens, whether this machine computed the rows, and the features that a
    head has not read, float32 [1, `size`], or None. Raises `BundleError` for rows of
    another bundle, and for a file that was altered or does not fit the buffers.
    """
    refusal = BundleError(f"{file} is not a saved prefix; save it again")
    arrays = read_arrays(file, refusal)
    with refusing(refusal, KeyError, ValueError):
        ids, digest = arrays[TOKENS], str(arrays[DIGEST])
        origin = read_json(str(arrays[IDENTITY]))
    if ids.dtype != np.int64 or ids.ndim != 1 or digest != digest_of(arrays):
        raise refusal
    tokens: list[int] = ids.tolist()
    if not isinstance(origin, dict) or origin.get("bundle") != identity["bundle"]:
        fact = f"{file} was saved with another bundle or adapter"
        raise BundleError(f"{fact}; save it again here")
    forms = {
        f"{owner}/{name}": form
        for owner, cache in caches.items()
        for name, form in cache.forms(len(tokens)).items()
    }
    stored = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    waiting = arrays.get(WAITING) if size else None
    if waiting is not None:
        forms[WAITING] = (1, size), np.dtype(np.float32)
    is_too_long = any(len(tokens) > cache.capacity for cache in caches.values())
    if is_too_long or any(stored.get(name) != forms[name] for name in forms):
        raise refusal
    kept = [arrays.get(f"{owner}/{KEPT}", 0) for owner in caches]
    if not all(0 <= rows <= min(WIDEST, len(tokens)) for rows in kept):
        raise refusal
    for owner, cache in caches.items():
        rows = {name: arrays[f"{owner}/{name}"] for name in cache.forms(0)}
        cache.restore(rows, len(tokens))
    return tokens, origin == identity, waiting
