"""GliDe's drafter (2402.02082): a layer that reads its target's keys and values."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads import head_layers
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule, Reads
from jetdraft.checkpoints.heads.head_files import HeadFiles, Sizes, Tensors
from jetdraft.checkpoints.layers import head_size
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.errors import UnsupportedModelError


def attend_to_target(
    query: Any, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> Tensor:
    """Attend with [b, heads, n, d] to [b, kv_heads, slots, d]: [b, n, heads, d]."""
    # The heads of a group lie beside each other: [b, kv_heads, group, n, d].
    rows = query.unflatten(1, (keys.shape[1], -1))
    scores = (rows @ keys[:, :, None].transpose(3, 4)).float()
    weights = (scores * scale + bias.float()[:, :, None]).softmax(-1).to(values.dtype)
    mixed: Tensor = (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2)
    return mixed


class Glide(DraftModule):
    """A decoder layer with cross-attention to the target's last keys and values.

        y = x + SelfAttention(norm(x))
        y = y + W_o Attention(rotated(W_q y), target's keys, target's values)
        z = y + MLP(norm(y))

    The rotation is the target's; the norm before the LM head is the drafter's.
    """

    published, mark = "GliDe", "cross.q_proj.weight"
    architecture = "GlideDrafter"
    reads = Reads(target_kv=True)

    def __init__(self, config: head_layers.HeadConfig, target: Any) -> None:
        super().__init__(config, target)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.stack = head_layers.make_layers(config)
        rotary: Any = getattr(target.get_decoder(), "rotary_emb", None)
        row = torch.zeros(1, 1)
        self.stack.rotary = copy.deepcopy(rotary)
        turned = self.stack.rotations(row[None], row)[0].shape[-1] if rotary else 0
        if turned != config.head_dim:
            raise UnsupportedModelError(
                f"{type(target).__name__} rotates {turned} of {config.head_dim} "
                "numbers of its keys, and GliDe reads whole rotations; choose another "
                "drafter"
            )
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        sizes = {"q_proj": (width, inner), "o_proj": (inner, width)}
        parts = {n: nn.Linear(*size, bias=False) for n, size in sizes.items()}
        self.cross = nn.ModuleDict(parts)
        self.norm = self.stack.norm(width)
        self.attend_with("sdpa")

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the states for the LM head, [b, n, h].

        `tokens` and `positions` are int64 [b, n], rotated `keys` and `values` [b,
        kv_heads, slots, d] the target's. The `bias` broadcasts to [b, 1, n, slots].
        """
        layer = self.first_layer
        states = self.embed_tokens(tokens)
        turns = self.stack.rotations(states, positions)
        mixed = layer.self_attn(
            layer.input_layernorm(states),
            position_embeddings=turns,
            attention_mask=None,
            **{head_layers.CACHE: cache},
        )[0]
        states, size = states + mixed, self.config.head_dim
        query = self.cross["q_proj"](states).unflatten(-1, (-1, size))
        rows = head_layers.rotate_rows(query.transpose(1, 2), turns)
        mixed = attend_to_target(rows, keys, values, bias, size**-0.5)
        states = states + self.cross["o_proj"](mixed.flatten(2))
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        normed: Tensor = self.norm(states)
        return normed

    def draft(self, given: DraftInputs) -> tuple[Tensor, None]:
        keys, values = given.target[0]
        slots = torch.arange(keys.shape[2])
        hides = (slots >= given.target_length).to(keys.dtype) * HIDDEN
        reads = keys, values, hides[None, None, None]
        hidden = self(given.tokens, given.positions, *reads, given.cache)
        return self.lm_head(hidden[:, given.answer_rows]), None

    @classmethod
    def configure(cls, files: HeadFiles, target: Checkpoint, tensors: Tensors) -> Sizes:
        config, ids = super().configure(files, target, tensors)
        text = target.model.config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        size = head_size(text)
        if size != config.head_dim or config.num_heads % heads:
            fact = f"has {config.num_heads} heads of {config.head_dim} numbers, but "
            fact += f"{target.source} keeps {heads} of {size}"
            raise files.refusal(fact, "give the drafter of this target")
        return config, ids
