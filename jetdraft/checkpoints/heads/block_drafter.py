"""A drafter that fills a block of masked tokens in one pass: DFlash and diffusion.

The rows of a block see each other and their whole context. A DFlash head has the
target's features as context and begins its block with the last token. A diffusion
drafter reads text: its context are rows of tokens like those of any decoder, and its
block are masks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.heads.head_config import DFLASH, HeadConfig
from jetdraft.checkpoints.heads.head_layers import (
    Ended,
    HeadLayers,
    own_layers,
    rotated,
)

Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of a layer's module and query [b, heads, q, d], key and value [b, kv_heads, k, d]:
the mixed values [b, q, heads, d]."""


class BlockDrafter(Ended):
    """DFlash (2602.06036), or a masked diffusion model as drafter (2408.05636).

    A DFlash head has the target's embedding, and its LM head unless it has its own;
    `ids` int64 [draft vocabulary] has the target's id of each row of the LM head, None
    if the rows are the target's. A diffusion drafter has an embedding of its own, to
    which its LM head is tied.

        drafter = BlockDrafter(config, target)
        context = drafter.fuse(taps)               # in the target's graph
        states = drafter(context, block, positions, masked(mask))
        logits = drafter.lm_head(drafter.guessed(states))
    """

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        self.ids: Tensor | None = None
        width = config.hidden_size
        self.stack: HeadLayers = own_layers(config)
        self.norm = self.stack.norm(width)
        if config.family == DFLASH:
            self.embed_tokens = target.get_input_embeddings()
            self.lm_head = target.get_output_embeddings()
            joined = len(config.taps) * config.target_hidden_size
            self.fc = nn.Linear(joined, width, bias=False)
            self.hidden_norm = self.stack.norm(width)
        else:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
            self.lm_head.weight = self.embed_tokens.weight
            self.mask = nn.Parameter(torch.zeros(width))

    @property
    def reads_text(self) -> bool:
        """Whether the context are tokens, not features."""
        return self.config.family != DFLASH

    @property
    def block_rows(self) -> int:
        """The rows of a block: the masks, and in DFlash the last token before them."""
        return self.config.slots + (not self.reads_text)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Features [b, n, h] of the target's states [b, n, target hidden] at the taps.

        In the type of fc's weight, which should be float32: in float16 they overflow.
        """
        states = [state.to(self.fc.weight.dtype) for state in taps]
        features: Tensor = self.hidden_norm(self.fc(torch.cat(states, dim=-1)))
        return features

    def forward(
        self, context: Tensor, block: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """The normed states of the rows with queries, [b, q, h].

        `context` are features [b, n, h], or tokens int64 [b, n] of a drafter that reads
        text; `block` are tokens int64 [b, m], with ids from the vocabulary's size on
        for masks; `positions` int64 [b, n + m] are those of context and block. The rows
        with queries are the block's, and before them the context's if that is text.
        """
        if self.reads_text:
            states = self._embedded(torch.cat([context, block], dim=1))
            keys = None
        else:
            states = self._embedded(block)
            keys = context.to(states.dtype)
        queries = positions[:, -states.shape[1] :]
        turns = [self.stack.rotations(states, rows) for rows in (queries, positions)]
        for layer in self.stack.layers:
            states = _layer(layer, states, keys, turns, attention)
        normed: Tensor = self.norm(states)
        return normed

    def guessed(self, states: Tensor) -> Tensor:
        """Of states of a block, [..., m, h], those of its masks, [..., slots, h]."""
        return states[..., -self.config.slots :, :]

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings [b, n, h] of tokens, and of masks."""
        is_mask = tokens >= self.config.vocab_size
        own = torch.where(is_mask, self.config.mask_token, tokens)
        rows: Tensor = self.embed_tokens(own)
        if not self.reads_text:
            return rows
        return torch.where(is_mask[..., None], self.mask.to(rows.dtype), rows)


def masked(mask: Tensor | None) -> Attention:
    """Attention in PyTorch over all rows, or those where `mask` [.., q, k] is true."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            query, key, value, mask, scale=module.scaling, enable_gqa=True
        )
        return mixed.transpose(1, 2)

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
        _by_head(module, name, rows)
        for name, rows in (("q", normed), ("k", sources), ("v", sources))
    )
    query, key = map(rotated, (query, key), turns)
    mixed = attention(module, query, key, value).flatten(2)
    states = states + module.o_proj(mixed)
    output: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return output


def _by_head(module: Any, name: str, rows: Tensor) -> Tensor:
    """A projection of rows [b, n, h], normed per head where the layer does so.

    [b, heads, n, d]
    """
    projected = getattr(module, f"{name}_proj")(rows)
    heads: Tensor = projected.unflatten(-1, (-1, module.head_dim))
    norm = getattr(module, f"{name}_norm", None)
    return (heads if norm is None else norm(heads)).transpose(1, 2)
