"""Drafters that fill a block of masked tokens in one pass; its rows see each other.

In a graph, whose attention is causal, they attend twice: their keys are written first,
then their queries follow in further rows, whose keys are copies that a bias hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.attention import Attention, attend
from jetdraft.checkpoints.heads import draft_module, head_layers
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_layers import project_heads, rotate_rows
from jetdraft.errors import CheckpointError

MAX_BLOCK_TOKENS = 64  # The most tokens of a block that a drafter may fill.


@dataclass(frozen=True)
class BlockConfig(head_layers.HeadConfig):
    """The sizes of a block drafter, and the token whose embedding stands for a mask."""

    mask_token: int = 0
    # Whether the row of the last token drafts too, and each mask one token later.
    anchor_drafts: bool = False
    markov_rank: int = 0  # The width of a Markov head, 0 without it.


class BlockDrafter(draft_module.DraftModule):
    """Decoder layers whose rows see a whole block."""

    config: BlockConfig
    reads_text = False  # Whether the context is made of tokens, not of features.
    renames: ClassVar[draft_module.Renames] = (
        (r"(?:model\.)?verifier_.*", None),
        (r"(?:model\.)?(layers\..*)", r"stack.\1"),
        (r"model\.(.*)", r"\1"),
    )

    def __init__(self, config: BlockConfig, target: Any = None) -> None:
        super().__init__(config, target)
        self.stack = head_layers.make_layers(config)
        self.norm = self.stack.norm(config.hidden_size)

    def forward(
        self, context: Tensor, block: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Return the block's normed states [b, q, h], and the text's if it reads text.

        `context` has features [b, n, h] or tokens int64 [b, n], `block` tokens int64
        [b, m] (masks from the vocabulary's size on), `positions` int64 [b, n + m].
        """
        reads = self.reads_text
        states = self.embed(torch.cat([context, block], dim=1) if reads else block)
        keys = None if reads else context.to(states.dtype)
        queries = positions[:, -states.shape[1] :]
        turns = [self.stack.rotations(states, rows) for rows in (queries, positions)]
        for layer in self.stack.layers:
            states = _run_layer(layer, states, keys, turns, attention)
        normed: Tensor = self.norm(states)
        return normed

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [b, n, h] of tokens and masks."""
        is_mask, mask = tokens >= self.config.vocab_size, self.config.mask_token
        rows: Tensor = self.embed_tokens(torch.where(is_mask, mask, tokens))
        return rows

    def mask_states(self, states: Tensor) -> Tensor:
        """Return the masks' states [..., slots, h] out of a block's [..., m, h]."""
        return states[..., -self.config.slots :, :]

    def logits(self, states: Tensor, block: Tensor) -> Tensor:
        """Return the logits [b, slots, choices] of a block's states and tokens."""
        logits: Tensor = self.lm_head(self.mask_states(states))
        return logits

    def draft(self, given: draft_module.DraftInputs) -> tuple[Tensor, None]:
        """Return the logits [1, slots, choices] of the masks; no carried state."""
        context = given.tokens if self.reads_text else given.features
        attention = block_attention(self.block_rows, self.reads_text)
        states = self(context, given.block, given.positions, attention)
        return self.logits(states, given.block), None


def masked_attention(mask: Tensor | None) -> Attention:
    """Return attention in PyTorch, over the keys where `mask` [.., q, k] is true."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, mask, scale=module.scaling, enable_gqa=True
        ).transpose(1, 2)

    return attention


def block_attention(size: int, context_asks: bool) -> Attention:
    """Return attention in which the last `size` rows see each other.

    If `context_asks`, the rows before them have queries too, and see no later rows.
    """

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        before = idle = torch.cat([key * 0] * groups, dim=1)
        if context_asks:
            before = torch.cat([query[:, :, :-size], idle[:, :, -size:]], dim=2)
        pairs = (before, query), (key, key), (value, value)
        q, k, v = (torch.cat([one, last[:, :, -size:]], dim=2) for one, last in pairs)
        mixed, _ = attend(module, q, k, v, None, module.scaling)
        if not context_asks:
            return mixed[:, -size:]
        return torch.cat([mixed[:, : -2 * size], mixed[:, -size:]], dim=1)

    return attention


def _run_layer(
    layer: Any,
    states: Tensor,
    keys: Tensor | None,
    turns: Sequence[tuple[Tensor, Tensor]],
    attention: Attention,
) -> Tensor:
    """Run a layer [b, q, h] that sees `keys` before its own; `turns` rotate both."""
    normed = layer.input_layernorm(states)
    sources = normed if keys is None else torch.cat([keys, normed], dim=1)
    module = layer.self_attn
    query = project_heads(module, "q", normed)
    key, value = (project_heads(module, name, sources) for name in "kv")
    query, key = map(rotate_rows, (query, key), turns)
    states = states + module.o_proj(attention(module, query, key, value).flatten(2))
    output: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return output


def read_block_size(files: HeadFiles, least: int) -> int:
    """Return the `block_size` of a config; raises `CheckpointError` if out of range."""
    size = files.positive_integer("block_size")
    if not least <= size <= MAX_BLOCK_TOKENS:
        raise CheckpointError(
            f"the config of {files.source} has block_size={size}; jetdraft fills "
            f"blocks of {least} to {MAX_BLOCK_TOKENS} tokens"
        )
    return size
