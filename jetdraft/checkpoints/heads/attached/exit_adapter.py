"""Kangaroo's adapter (2404.18911): one attention layer behind the target's lower half.

Row t reads the state of row t between two layers of the target, and predicts token
t + 1 with the target's LM head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import KANGAROO, HeadConfig
from jetdraft.checkpoints.heads.head_fields import (
    FIRST_LAYER,
    layer_fields,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import KANGAROO_KEYS, check_keys, number
from jetdraft.checkpoints.heads.head_layers import CACHE, HeadLayers, own_layers
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.errors import CheckpointError

ARCHITECTURE = "KangarooAdapter"
"""What the config of an adapter calls it."""


class ExitAdapter(nn.Module):
    """A norm, attention over its own rows, a residual and a norm; no MLP.

    Its tap is the layer below which the target is cut. The LM head is the target's.

        adapter = ExitAdapter(config, target)
        hidden = adapter(states, positions)
        logits = adapter.lm_head(hidden)
    """

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        self.ids: Tensor | None = None
        self.lm_head: nn.Module = target.get_output_embeddings()
        self.stack: HeadLayers = own_layers(config)
        del self.layer.mlp, self.layer.post_attention_layernorm
        self.norm = self.stack.norm(config.hidden_size)
        self.attend_with("sdpa")

    @property
    def exit_layer(self) -> int:
        """The number of layers in the lower half."""
        return self.config.taps[0]

    @property
    def layer(self) -> Any:
        """The decoder layer without its MLP."""
        return self.stack.layers[0]

    def attend_with(self, implementation: str) -> None:
        """Attend as "eager" or "sdpa", or over jetdraft's buffers ("jetdraft")."""
        self.stack.attend_with(implementation)

    def forward(
        self, states: Tensor, positions: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """The states for the LM head: [b, n, h] at positions int64 [b, n] to [b, n, h].

        Without a mask, attention in transformers is causal.
        """
        mixed = self.layer.self_attn(
            self.layer.input_layernorm(states),
            position_embeddings=self.stack.rotations(states, positions),
            attention_mask=None,
            **{CACHE: cache},
        )[0]
        normed: Tensor = self.norm(states + mixed)
        return normed

    def get_output_embeddings(self) -> nn.Module:
        """The LM head, as models of transformers give it."""
        return self.lm_head


def is_kangaroo(files: HeadFiles) -> bool:
    """Whether the tensors are those of a layer without an MLP."""
    named = (files.config.get("architectures") or [""])[0] == ARCHITECTURE
    first = [name for name in files.tensors if name.startswith(FIRST_LAYER)]
    return named or (bool(first) and not any(".mlp." in name for name in first))


def read_kangaroo(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load.

    Raises `CheckpointError` for an adapter that does not fit the target.
    """
    source, config = files.source, files.config
    check_keys(source, config, KANGAROO_KEYS)
    fields = layer_fields(source, config, files.tensors)
    fields["target_hidden_size"] = target_size(source, config, target)
    layer, layers = number(source, config, "exit_layer"), decoder_layers(target.model)
    if fields["num_layers"] != 1:
        raise CheckpointError(
            f"{source} has {fields['num_layers']} layers, and a Kangaroo adapter has "
            "one; fetch it again"
        )
    if layer >= len(layers):
        raise CheckpointError(
            f"{source} reads the state below layer {layer}, but {target.source} has "
            f"{len(layers)} layers; give the adapter of this target"
        )
    vocabulary = vocabulary_size(source, config, target)
    kept = {
        f"stack.{name}" if name.startswith("layers.") else name: tensor
        for name, tensor in files.tensors.items()
        if ".rotary_emb." not in name and not name.startswith("lm_head.")
    }
    return HeadConfig(
        family=KANGAROO,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
        taps=(layer,),
        **fields,
    ), kept
