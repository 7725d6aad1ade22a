"""Chimera's drafter (2402.15758): a trigram encoder, and a layer over all features."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetdraft.checkpoints.attention import Attention, attend_to_buffers
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_layers
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.heads.head_layers import project_heads, rotate_rows

ROW_TOKENS = 3  # The tokens that the trigram encoder reads.


class Chimera(DraftModule):
    """A trigram encoder, a decoder layer over the target's features, and a projection.

    g = down(e + silu(block(e)))            e: the embeddings of three tokens
    z = g + Attention(norm(g); keys and values of norm(features) up to row t - 1)
    surrogate = norm(z + MLP(norm(z)))      stands for the features of row t
    hidden = out(features of row t - 1 and surrogate), in place of a wide LM head
    """

    published, mark = "Chimera", "trigram.block.weight"
    architecture = "ChimeraDrafter"
    reads = Reads(tokens=ROW_TOKENS, features=True, carries=True)

    def __init__(self, config: head_layers.HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        self.stack = head_layers.make_layers(config)
        width = config.hidden_size
        wide = ROW_TOKENS * width
        sizes = {"block": wide, "down": width}
        parts = {name: nn.Linear(wide, n, bias=False) for name, n in sizes.items()}
        self.trigram = nn.ModuleDict(parts)
        self.norm = self.stack.norm(width)
        self.out = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        """Return the states for the LM head, and the surrogates: [b, n, h] both.

        `tokens` are int64 [b, n, 3], the row's token last; `features` [b, n, h] and
        `positions` int64 [b, n] are of the row before.
        """
        layer = self.first_layer
        rows = self.embed_tokens(tokens.flatten(1))
        joined = rows.unflatten(1, (-1, ROW_TOKENS)).flatten(2)
        states = self.trigram["down"](joined + F.silu(self.trigram["block"](joined)))
        turns = self.stack.rotations(states, positions)
        attending = layer.self_attn
        query = project_heads(attending, "q", layer.input_layernorm(states))
        query = rotate_rows(query, turns)
        key, value = self.keys_values(features, positions)
        mixed = attention(attending, query, key, value).flatten(2)
        states = states + attending.o_proj(mixed)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        surrogate: Tensor = self.norm(states)
        hidden: Tensor = self.out(torch.cat([features, surrogate], dim=-1))
        return hidden, surrogate

    def keys_values(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys and values [b, kv_heads, n, d] of features [b, n, h]."""
        rows = self.first_layer.input_layernorm(features)
        turns = self.stack.rotations(features, positions)
        key, value = (project_heads(self.first_layer.self_attn, n, rows) for n in "kv")
        return rotate_rows(key, turns), value

    def draft(self, given: DraftInputs) -> tuple[Tensor, Tensor]:
        """Return the logits of the answered rows, and the surrogates."""
        trigrams = torch.cat([given.recent, given.tokens[..., None]], dim=-1)
        read = given.features, given.positions, attend_to_buffers
        hidden, surrogate = self(trigrams, *read)
        return self.lm_head(hidden[:, given.answer_rows]), surrogate

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        config, ids = super().configure(files, target, tensors)
        if config.qk_norm:
            fact = "is not a Chimera drafter with one Llama layer"
            raise files.refusal(fact, "give such a drafter")
        return config, ids
