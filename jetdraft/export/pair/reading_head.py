"""A head that reads its target's states, as a model that reads text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head import Head
from jetdraft.checkpoints.taps import Taps


class ReadingHead(nn.Module):
    """Runs the target, then the head over its features, so that text gives logits.

    Only the matrices of the head's own graph are its modules: the target's and the
    fusion's, which are in the target's graph, are not quantized with it.

        ReadingHead(model, head, taps)(ids, use_cache=False, logits_to_keep=4).logits
    """

    def __init__(self, target: Any, head: Head, taps: Taps) -> None:
        super().__init__()
        self._others = target, head, taps  # a tuple, which is no module
        self.stack = head.stack
        if not taps.layers:
            self.fc = head.fc
        lends = target.get_output_embeddings()
        self.lm_head = None if head.lm_head is lends else head.lm_head

    def get_output_embeddings(self) -> nn.Module:
        """The LM head, as models of transformers give it."""
        return self._others[1].lm_head

    def forward(
        self, ids: Tensor, use_cache: bool, logits_to_keep: int
    ) -> SimpleNamespace:
        """The logits [b, n, vocabulary] for the last n tokens of `ids` int64 [b, m].

        The head gives none for the first token, so n must be below m.
        """
        target, head, taps = self._others
        with taps.watching(target) as features:
            target(input_ids=ids, use_cache=use_cache, logits_to_keep=1)
        positions = torch.arange(ids.shape[1] - 1)[None]
        hidden, _ = head(ids[:, 1:], features[0][:, :-1], positions)
        return SimpleNamespace(logits=head.lm_head(hidden[:, -logits_to_keep:]))
