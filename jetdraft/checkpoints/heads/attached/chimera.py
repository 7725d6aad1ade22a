"""Chimera's drafter (2402.15758): a trigram encoder, and one layer over all features.

Row t reads token t, the two tokens before it and the features of row t - 1, and
predicts token t + 1. What the layer makes of the row stands for the features of row t
in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import CHIMERA, HeadConfig
from jetdraft.checkpoints.heads.head_fields import (
    layer_fields,
    own_tensors,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import CHIMERA_KEYS, check_keys
from jetdraft.checkpoints.heads.head_layers import (
    Ended,
    HeadLayers,
    own_layers,
    rotated,
)
from jetdraft.errors import CheckpointError

ARCHITECTURE = "ChimeraDrafter"
"""What the config of a drafter calls it."""

GRAM = 3
"""The tokens that the trigram encoder reads."""

Attention = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of the attention's module and rotated query [b, heads, n, d], key and value
[b, kv_heads, n, d]: the mixed values [b, n, heads, d]."""


class Chimera(Ended):
    """A trigram encoder, a decoder layer over the target's features, and a projection.

        g = down(e + silu(block(e)))            e: the embeddings of three tokens
        z = g + Attention(norm(g); keys and values of norm(features) up to row t - 1)
        surrogate = norm(z + MLP(norm(z)))      stands for the features of row t
        hidden = out(features of row t - 1 and surrogate, side by side)

    Embedding and LM head are the target's; the paper has an LM head of 2 h numbers for
    each place of a draft instead of `out`.

        drafter = Chimera(config, target)
        hidden, surrogate = drafter(trigrams, features, positions, attention)
        logits = drafter.lm_head(hidden)
    """

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        self.ids: Tensor | None = None
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.stack: HeadLayers = own_layers(config)
        width = config.hidden_size
        self.trigram = nn.ModuleDict(
            {
                "block": nn.Linear(GRAM * width, GRAM * width, bias=False),
                "down": nn.Linear(GRAM * width, width, bias=False),
            }
        )
        self.norm = self.stack.norm(width)
        self.out = nn.Linear(2 * width, width, bias=False)

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self.stack.layers[0]

    def forward(
        self,
        trigrams: Tensor,
        features: Tensor,
        positions: Tensor,
        attention: Attention,
    ) -> tuple[Tensor, Tensor]:
        """The states for the LM head, and the surrogates of features: [b, n, h] both.

        `trigrams` are int64 [b, n, 3], the row's token last; `features` [b, n, h] those
        of the row before, and `positions` int64 [b, n] that row's.
        """
        layer = self.layer
        states = self._encoded(trigrams)
        turns = self.stack.rotations(states, positions)
        query = rotated(self._by_head("q", layer.input_layernorm(states)), turns)
        key, value = self.keys_values(features, positions)
        mixed = attention(layer.self_attn, query, key, value).flatten(2)
        states = states + layer.self_attn.o_proj(mixed)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        surrogate: Tensor = self.norm(states)
        hidden: Tensor = self.out(torch.cat([features, surrogate], dim=-1))
        return hidden, surrogate

    def keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys, and values, of features [b, n, h]: [b, kv_heads, n, d] both."""
        normed = self.layer.input_layernorm(features)
        turns = self.stack.rotations(features, positions)
        key, value = (self._by_head(name, normed) for name in "kv")
        return rotated(key, turns), value

    def _encoded(self, trigrams: Tensor) -> Tensor:
        """The trigram encoder: int64 [b, n, 3] to [b, n, h]."""
        # In a graph, a quantized embedding takes ids of two axes.
        rows = self.embed_tokens(trigrams.flatten(1))
        embedded = rows.unflatten(1, (-1, GRAM)).flatten(2)
        states: Tensor = self.trigram["down"](
            embedded + F.silu(self.trigram["block"](embedded))
        )
        return states

    def _by_head(self, name: str, rows: Tensor) -> Tensor:
        """A projection of rows [b, n, h]: [b, heads, n, d]."""
        projected = getattr(self.layer.self_attn, f"{name}_proj")(rows)
        heads: Tensor = projected.unflatten(-1, (-1, self.config.head_dim))
        return heads.transpose(1, 2)


def is_chimera(files: HeadFiles) -> bool:
    """Whether the folder has a Chimera drafter in jetdraft's layout."""
    return "trigram.block.weight" in files.tensors


def read_chimera(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load.

    Raises `CheckpointError` for a drafter that does not fit the target.
    """
    source, config = files.source, files.config
    check_keys(source, config, CHIMERA_KEYS)
    fields = layer_fields(source, config, files.tensors)
    fields["target_hidden_size"] = target_size(source, config, target)
    if fields["num_layers"] != 1 or fields["qk_norm"]:
        raise CheckpointError(
            f"{source} is not a Chimera drafter with one Llama layer; give such a "
            "drafter"
        )
    vocabulary = vocabulary_size(source, config, target)
    return HeadConfig(
        family=CHIMERA, vocab_size=vocabulary, draft_vocab_size=vocabulary, **fields
    ), own_tensors(files.tensors)
