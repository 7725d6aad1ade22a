"""Falcon's drafter (2412.12639): a head whose rows answer for k tokens at a time.

A graph's attention is causal: the runtime has a copy of each row after its block.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import LAYER_KEYS, HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import HeadConfig, make_layers

MAX_ROWS = 8  # The most rows of a block; the paper has 2 to 4.


class Recurrence(nn.Module):
    """An LSTM of two layers over a short window; the paper's runs over all rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(n, 4 * width) for n in (2 * width, width))
        self.states = nn.ModuleList(
            nn.Linear(width, 4 * width, bias=False) for _ in self.inputs
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Return the states [..., h] after the last of the rows [..., k, 2 * h]."""
        steps = list(rows.unbind(-2))
        for enter, again in zip(self.inputs, self.states, strict=True):
            gates = [enter(row) for row in steps]
            memory, steps[0] = _lstm_step(gates[0], None)
            for place in range(1, len(steps)):
                own = gates[place] + again(steps[place - 1])
                memory, steps[place] = _lstm_step(own, memory)
        return steps[-1]


def _lstm_step(gates: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an LSTM's memory and state for gates [..., 4 * h]; None is zero memory."""
    admit, forget, new, show = gates.chunk(4, dim=-1)
    kept = admit.sigmoid() * new.tanh()
    if memory is not None:
        kept = kept + forget.sigmoid() * memory
    return kept, show.sigmoid() * kept.tanh()


class Falcon(DraftModule):
    """A window's recurrence and a decoder layer with relaxed causal attention.

    x = embedding of token t + 1 and features of row t, side by side
    s = Recurrence(x of the last k rows)
    features of row t + k = layer(s; rows up to the end of t's block)
    """

    published, mark = "Falcon", "recurrence.inputs.0.weight"
    architecture = "FalconDrafter"
    reads = Reads(features=True, windows=True, carries=True)
    keys = LAYER_KEYS | {"block_size"}

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        self.recurrence = Recurrence(config.hidden_size)
        self.stack = make_layers(config)
        self.attend_with("sdpa")

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Predict the features [b, n, h] of the rows k places later.

        `tokens` int64 [b, n, k] and `features` [b, n, k, h] are a row's window, its own
        last; `positions` int64 [b, n]; `mask` [1, 1, n, slots].
        """
        embedded = self.embed_tokens(tokens.flatten(1)).unflatten(1, tokens.shape[1:])
        joined = torch.cat([embedded, features.to(embedded.dtype)], dim=-1)
        predicted: Tensor = self.stack(self.recurrence(joined), positions, cache, mask)
        return predicted

    def draft(self, given: DraftInputs) -> tuple[Tensor, Tensor]:
        tokens = torch.cat([given.recent, given.tokens[..., None]], dim=-1)
        size, width = self.config.slots, self.config.feature_size
        windows = given.features.reshape(1, -1, size, width)
        predicted = self(tokens, windows, given.positions, given.cache)
        return self.lm_head(predicted[:, given.answer_rows]), predicted

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        config, ids = super().configure(files, target, tensors)
        slots = files.positive_integer("block_size")
        if not 2 <= slots <= MAX_ROWS:
            fact = "is not a Falcon drafter of one layer for blocks of 2 to "
            raise files.refusal(f"{fact}{MAX_ROWS}", "give such a drafter")
        return replace(config, slots=slots), ids
