"""Drafters that fill a block of masked tokens in one pass, and how their rows attend.

Rows of a block see each other. In a graph, whose attention is causal, they attend
twice: their keys are written first, then their queries follow in further rows, whose
keys are copies that a bias hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.attention import attend
from jetdraft.checkpoints.heads.draft_module import LAYERS, DraftModule, Given
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_layers import (
    HeadConfig,
    by_head,
    own_layers,
    rotated,
)
from jetdraft.errors import CheckpointError

Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's module and query [b, heads, q, d], key and value [b, kv_heads, k, d]:
the mixed values [b, q, heads, d]."""

MAX_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """The sizes of a drafter of blocks, and the token that stands for a mask."""

    mask_token: int = 0


class BlockDrafter(DraftModule):
    """Decoder layers whose rows attend in both directions inside a block.

        states = drafter(context, block, positions, masked(mask))
        logits = drafter.lm_head(drafter.guessed(states))

    A subclass sets its embedding, its LM head, and `keys_of`.
    """

    config: BlockConfig
    reads_text = False
    """Whether the context are tokens, not features."""

    renames = (
        (r"(?:model\.)?verifier_.*", None),
        (r"(?:model\.)?" + LAYERS[0], LAYERS[1]),
        (r"model\.(.*)", r"\1"),
    )

    def __init__(self, config: BlockConfig, target: Any = None) -> None:
        super().__init__(config, target)
        self.stack = own_layers(config)
        self.norm = self.stack.norm(config.hidden_size)

    def forward(
        self, context: Tensor, block: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """The normed states [b, q, h] of the block, and of text before it.

        `context` are features [b, n, h], or tokens int64 [b, n] of a drafter that reads
        text; `block` are tokens int64 [b, m], masks from the vocabulary's size on;
        `positions` int64 [b, n + m] are of both.
        """
        if self.reads_text:
            states = self.embedded(torch.cat([context, block], dim=1))
            keys = None
        else:
            states = self.embedded(block)
            keys = context.to(states.dtype)
        queries = positions[:, -states.shape[1] :]
        turns = [self.stack.rotations(states, rows) for rows in (queries, positions)]
        for layer in self.stack.layers:
            states = _layer(layer, states, keys, turns, attention)
        normed: Tensor = self.norm(states)
        return normed

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings [b, n, h] of tokens, and of masks."""
        raise NotImplementedError

    def guessed(self, states: Tensor) -> Tensor:
        """The masks' states [..., slots, h], of a block's states [..., m, h]."""
        return states[..., -self.config.slots :, :]

    def draft(self, given: Given) -> tuple[Tensor, None]:
        context = given.tokens if self.reads_text else given.features
        attention = both_ways(self.block_rows, self.reads_text)
        states = self(context, given.block, given.positions, attention)
        return self.lm_head(self.guessed(states)), None


def masked(mask: Tensor | None) -> Attention:
    """Attention in PyTorch over all rows, or those where `mask` [.., q, k] is true."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, scale=module.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    return attention


def both_ways(size: int, context_asks: bool) -> Attention:
    """Attention in both directions inside the last `size` rows, over the buffers.

    If the context has queries, its rows attend to the rows up to their own.
    """

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        idle = torch.cat([key * 0] * groups, dim=1)
        before = idle
        if context_asks:
            before = torch.cat([query[:, :, :-size], idle[:, :, -size:]], dim=2)
        twice = [
            torch.cat([first, last[:, :, -size:]], dim=2)
            for first, last in ((before, query), (key, key), (value, value))
        ]
        mixed, _ = attend(module, twice[0], twice[1], twice[2], None, module.scaling)
        if not context_asks:
            return mixed[:, -size:]
        return torch.cat([mixed[:, : -2 * size], mixed[:, -size:]], dim=1)

    return attention


def _layer(
    layer: Any,
    states: Tensor,
    keys: Tensor | None,
    turns: Sequence[tuple[Tensor, Tensor]],
    attention: Attention,
) -> Tensor:
    """One decoder layer [b, q, h], whose keys and values have rows of `keys` first.

    `turns` are the rotations of the queries and of all keys.
    """
    normed = layer.input_layernorm(states)
    sources = normed if keys is None else torch.cat([keys, normed], dim=1)
    module = layer.self_attn
    query, key, value = (
        by_head(module, name, rows)
        for name, rows in (("q", normed), ("k", sources), ("v", sources))
    )
    query, key = map(rotated, (query, key), turns)
    mixed = attention(module, query, key, value).flatten(2)
    states = states + module.o_proj(mixed)
    output: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return output


def block_size(files: HeadFiles, least: int) -> int:
    """The `block_size` of a config; raises `CheckpointError` out of range."""
    size = files.number("block_size")
    if not least <= size <= MAX_BLOCK_TOKENS:
        raise CheckpointError(
            f"the config of {files.source} has block_size={size}; jetdraft fills "
            f"blocks of {least} to {MAX_BLOCK_TOKENS} tokens"
        )
    return size
