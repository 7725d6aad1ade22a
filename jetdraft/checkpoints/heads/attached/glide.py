"""GliDe's drafter (2402.02082): one layer that reads the keys and values of its target.

Row t reads token t and predicts token t + 1. Between self-attention and MLP its query
attends to the rows that the target's last layer has in its buffers, so the drafter
knows what the target made of the text, up to the token before the draft.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import GLIDE, HeadConfig
from jetdraft.checkpoints.heads.head_fields import (
    layer_fields,
    own_tensors,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import GLIDE_KEYS, check_keys
from jetdraft.checkpoints.heads.head_layers import (
    CACHE,
    Ended,
    HeadLayers,
    own_layers,
    rotated,
)
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.errors import CheckpointError, UnsupportedModelError

ARCHITECTURE = "GlideDrafter"
"""What the config of a drafter calls it."""


class Glide(Ended):
    """A decoder layer with cross-attention to the target's keys and values.

        y = x + SelfAttention(norm(x))
        y = y + W_o Attention(rotated(W_q y), target's keys, target's values)
        z = y + MLP(norm(y))

    The query is rotated as the target rotates its own. Embedding and LM head are the
    target's; a norm before the LM head is the drafter's. The keys and values of the
    self-attention depend on the tokens alone, since there is one layer.

        drafter = Glide(config, target)
        hidden = drafter(tokens, positions, keys, values, bias)
        logits = drafter.lm_head(hidden)
    """

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        self.ids: Tensor | None = None
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.stack: HeadLayers = own_layers(config)
        rotary = getattr(target.get_decoder(), "rotary_emb", None)
        if rotary is None:
            raise UnsupportedModelError(
                f"{type(target).__name__} has no rotary embedding, with which GliDe "
                "reads its keys; choose another drafter"
            )
        self.stack.rotary = copy.deepcopy(rotary)
        width, inner = config.hidden_size, config.num_heads * config.head_dim
        self.cross = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, inner, bias=False),
                "o_proj": nn.Linear(inner, width, bias=False),
            }
        )
        self.norm = self.stack.norm(width)
        self.attend_with("sdpa")

    @property
    def layer(self) -> Any:
        """The decoder layer."""
        return self.stack.layers[0]

    def attend_with(self, implementation: str) -> None:
        """Attend as "eager" or "sdpa", or over jetdraft's buffers ("jetdraft")."""
        self.stack.attend_with(implementation)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """The states for the LM head, [b, n, h].

        `tokens` and `positions` are int64 [b, n], `keys` and `values` the target's
        [b, kv_heads, slots, d], rotated. The `bias` of the cross-attention's scores
        broadcasts to [b, 1, n, slots].
        """
        states = self.embed_tokens(tokens)
        turns = self.stack.rotations(states, positions)
        states = (
            states
            + self.layer.self_attn(
                self.layer.input_layernorm(states),
                position_embeddings=turns,
                attention_mask=None,
                **{CACHE: cache},
            )[0]
        )
        states = states + self._crossed(states, turns, keys, values, bias)
        states = states + self.layer.mlp(self.layer.post_attention_layernorm(states))
        normed: Tensor = self.norm(states)
        return normed

    def _crossed(
        self,
        states: Tensor,
        turns: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """What the rows read of the target, [b, n, h]."""
        query = self.cross["q_proj"](states).unflatten(-1, (-1, self.config.head_dim))
        rows: Any = rotated(query.transpose(1, 2), turns)
        # The heads of a group lie beside each other: [b, kv_heads, group, n, d].
        query = rows.unflatten(1, (keys.shape[1], -1))
        scores = (query @ keys[:, :, None].transpose(3, 4)).float()
        scores = scores * self.config.head_dim**-0.5 + bias.float()[:, :, None]
        weights = scores.softmax(-1).to(values.dtype)
        mixed = (weights @ values[:, :, None]).flatten(1, 2).transpose(1, 2).flatten(2)
        read: Tensor = self.cross["o_proj"](mixed)
        return read


def read_layer(target: Any) -> int:
    """The target's layer whose keys and values are read: its last."""
    return len(decoder_layers(target)) - 1


def is_glide(files: HeadFiles) -> bool:
    """Whether the folder has a GliDe drafter."""
    return "cross.q_proj.weight" in files.tensors


def read_glide(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load.

    Raises `CheckpointError` for a drafter that does not fit the target.
    """
    source, config = files.source, files.config
    check_keys(source, config, GLIDE_KEYS)
    fields = layer_fields(source, config, files.tensors)
    fields["target_hidden_size"] = target_size(source, config, target)
    if fields["num_layers"] != 1:
        raise CheckpointError(
            f"{source} has {fields['num_layers']} layers, and jetdraft reads GliDe "
            "drafters of one; give such a drafter"
        )
    text = target.model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or (
        text.hidden_size // text.num_attention_heads
    )
    if size != fields["head_dim"] or fields["num_heads"] % heads:
        raise CheckpointError(
            f"{source} has {fields['num_heads']} heads of {fields['head_dim']} "
            f"numbers, but {target.source} keeps {heads} of {size}; give the drafter "
            "of this target"
        )
    vocabulary = vocabulary_size(source, config, target)
    return HeadConfig(
        family=GLIDE, vocab_size=vocabulary, draft_vocab_size=vocabulary, **fields
    ), own_tensors(files.tensors)
