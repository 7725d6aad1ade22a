"""The target as a teacher: its states of texts, computed or read from a disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetdraft.train.data import IGNORED, Batch
from jetdraft.train.head.head_losses import Lesson
from jetdraft.train.taught.precision import precision
from jetdraft.train.taught.tensor_cache import TensorCache


class Teacher:
    """Gives the lesson of a batch.

    `taps` are the target's residual streams that the head reads, `ids` int64 [draft
    vocabulary] the tokens that it can draft, or None for all. With a `cache` each text
    runs through the target once; its states are kept there in float16, or in float32
    where they are too large for it.

        lesson = Teacher(model, (2, 4, 6), ids).lesson(batch)
    """

    def __init__(
        self,
        model: Any,
        taps: Sequence[int],
        ids: Tensor | None,
        cache: StateCache | None = None,
    ) -> None:
        self.model = model
        self.taps = tuple(taps)
        self.ids = ids
        self.cache = cache

    @torch.no_grad()
    def lesson(self, batch: Batch) -> Lesson:
        """What the target says of a batch, on the batch's device."""
        with precision(batch.ids.device):
            return self._lesson(batch)

    def _lesson(self, batch: Batch) -> Lesson:
        states = self._states(batch)
        *taps, final = states.chunk(len(self.taps) + 1, dim=-1)
        logits = self._logits(final)
        known = torch.ones_like(batch.ids, dtype=torch.bool)
        if self.ids is not None:
            ids = self.ids.to(logits.device)
            known = torch.isin(logits.argmax(-1), ids)
            logits = logits[..., ids]
        return Lesson(
            batch.ids, batch.labels, list(taps) or [final], final, logits, known
        )

    def _logits(self, final: Tensor) -> Tensor:
        """The target's logits [b, T, vocabulary] of states after its final norm."""
        logits: Tensor = self.model.get_output_embeddings()(final)
        return logits

    def _states(self, batch: Batch) -> Tensor:
        """The states at the taps and after the final norm, side by side [b, T, s]."""
        if self.cache is None:
            return self._computed(batch.ids)
        rows = [self.cache.read(key) for key in map(_key, _texts(batch))]
        if any(row is None for row in rows):
            states = self._computed(batch.ids)
            for text, row in zip(_texts(batch), states, strict=True):
                self.cache.write(_key(text), row[: len(text)])
            return states
        states = torch.zeros(*batch.ids.shape, rows[0].shape[-1])  # type: ignore[union-attr]
        for index, row in enumerate(rows):
            assert row is not None
            states[index, : len(row)] = row
        return states.to(batch.ids.device)

    def _computed(self, ids: Tensor) -> Tensor:
        return torch.cat(states_at(self.model, ids, (*self.taps, -1)), dim=-1).float()


@torch.no_grad()
def states_at(model: Any, ids: Tensor, taps: Sequence[int]) -> list[Tensor]:
    """The residual streams [b, T, h] at some taps; tap -1 is after the final norm.

    states_at(target.model, ids, (2, 4, -1))
    """
    outputs = model(
        input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1
    )
    return [outputs.hidden_states[tap] for tap in taps]


def _texts(batch: Batch) -> list[Tensor]:
    """The ids of each row without padding; the last token of a text is learned."""
    ends = [int(row.nonzero()[-1]) + 1 for row in batch.labels != IGNORED]
    return [ids[:end] for ids, end in zip(batch.ids, ends, strict=True)]


def _key(text: Tensor) -> str:
    return hashlib.sha256(text.cpu().numpy().tobytes()).hexdigest()[:32]


class StateCache(TensorCache):
    """States of texts on a disk, as halves where they are small enough.

    cache = StateCache(Path("states"), owner, process=0)
    """

    def read(self, key: str) -> Tensor | None:
        """The states float32 [T, s] of a text, or None."""
        states = super().read(key)
        return None if states is None else states.float()

    def write(self, key: str, tensor: Tensor) -> None:
        """Keep the states of a text; a shard is written when it is full."""
        if self.has(key):
            return
        half = tensor.cpu().half()
        fits = bool(torch.isfinite(half).all())
        super().write(key, half if fits else tensor.cpu())
