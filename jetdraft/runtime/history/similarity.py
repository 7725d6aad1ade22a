"""How similar two requests are, by the target's own token embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jetdraft.errors import BundleError
from jetdraft.runtime.drafts.arrays import Float32s


class Similarity:
    """Turns token ids into a unit vector; similar requests have a large dot product.

    Reads the embeddings, int8 or float [vocab, d], from an npy file that export wrote.
    Raises `BundleError` if it cannot be read, or has fewer rows than `vocab_size`.

    similarity = Similarity(Path("bundle/similarity.npy"))
    similarity.vector([5, 8, 9]) @ similarity.vector([5, 8, 2])    # near 1
    """

    def __init__(self, file: Path, vocab_size: int = 0) -> None:
        refusal = BundleError(f"{file} cannot be read; export the bundle again")
        try:
            self._table = np.lib.format.open_memmap(file, mode="r")
        except (OSError, ValueError) as error:
            raise refusal from error
        if self._table.ndim != 2 or self._table.dtype.kind not in "fi":
            raise refusal
        if len(self._table) < vocab_size:
            raise refusal

    def vector(self, tokens: Sequence[int]) -> Float32s:
        """Float32 [d] of unit length: the direction of the mean embedding."""
        mean = self._table[np.asarray(tokens)].astype(np.float32).mean(0)
        vector: Float32s = mean / max(float(np.linalg.norm(mean)), 1e-9)
        return vector
