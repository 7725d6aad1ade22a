"""Labels that are computed once for each text and kept on a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from jetdraft.train.data import Batch
from jetdraft.train.drafter.labels import Labels, with_rest
from jetdraft.train.drafter.pupil import learned
from jetdraft.train.taught.tensor_cache import TensorCache

PARTS = ("wanted", "mass", "known", "tokens")
"""The fields of labels; they are kept apart."""


class LabelCache:
    """The most likely tokens of each place of a text, in the shards of a folder.

    `kept` tokens of each place are kept with their log probabilities in float16, and
    all others as one. `owner` says what the labels were computed with.

        cache = LabelCache(Path("labels"), owner, kept=64)
        labels = cache.read(batch)
    """

    def __init__(self, folder: Path, owner: str, kept: int, process: int = 0) -> None:
        self.kept = kept
        self._tensors = TensorCache(folder, f"labels of {kept}, {owner}", process)

    def read(self, batch: Batch) -> Labels | None:
        """The labels of a batch; None if one of its texts is not there."""
        rows = [self._of_text(key) for key in _keys(batch)]
        whole = [row for row in rows if row is not None]
        if len(whole) < len(rows):
            return None
        # Autocast, which surrounds a training, cannot join halves.
        wanted, mass, known, tokens = zip(*whole, strict=True)
        device = batch.ids.device
        return Labels(
            torch.cat([part.float() for part in wanted]).to(device),
            torch.cat(mass).to(device),
            torch.cat(known).to(device),
            torch.cat(tokens).long().to(device),
        )

    def write(self, batch: Batch, labels: Labels) -> Labels:
        """Keep the exact labels of a batch; gives what is kept of them."""
        count = min(self.kept, labels.wanted.shape[-1] - 1)
        best = labels.wanted.topk(count, dim=-1)
        half = with_rest(best.values).half()
        kept = Labels(half.float(), labels.mass, labels.known, best.indices)
        sizes = learned(batch).sum(-1).tolist()
        parts = (half, kept.mass, kept.known, best.indices.int())
        of_texts = zip(*(torch.split(part, sizes) for part in parts), strict=True)
        for key, text in zip(_keys(batch), of_texts, strict=True):
            for name, part in zip(PARTS, text, strict=True):
                # A part of a shard would keep the whole batch in memory.
                self._tensors.write(f"{key}.{name}", part.clone())
        return kept

    def flush(self) -> None:
        """Write what is not in a file yet."""
        self._tensors.flush()

    def _of_text(self, key: str) -> Sequence[Tensor] | None:
        parts = [self._tensors.read(f"{key}.{name}") for name in PARTS]
        there = [part for part in parts if part is not None]
        return there if len(there) == len(parts) else None


def _keys(batch: Batch) -> list[str]:
    """A key for each text: its ids, and which of them are learned."""
    rows = torch.stack([batch.ids, batch.labels], dim=1).cpu()
    keys = []
    for row in rows:
        end = int((row[1] >= 0).nonzero()[-1]) + 1
        keys.append(hashlib.sha256(row[:, :end].numpy().tobytes()).hexdigest()[:32])
    return keys
