"""The decoder layers of heads, from the code of transformers."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from jetdraft.checkpoints.heads.head_config import EAGLE1, EAGLE3, HeadConfig
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.errors import UnsupportedModelError

CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaDecoderLayer.forward).parameters
    else "past_key_values"
)
"""The name of the cache in the layers of this transformers."""


class HeadLayers(nn.Module):
    """A stack of decoder layers, their rotary embedding, and the kind of their norms.

        layers = own_layers(config)
        states = layers(states, positions, cache, mask)

    `states` are [b, n, h]. The first layer of EAGLE-3 takes `embedded` [b, n, h] too.
    `mask` [1, 1, n, slots] is added to the scores; None lets the attention decide.
    """

    def __init__(self, layers: list[nn.Module], rotary: nn.Module, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rotary = rotary
        self.config = config
        self.norm_class: type[nn.Module] = next(
            type(module)
            for name, module in layers[-1].named_modules()
            if "norm" in name and not isinstance(module, nn.Identity)
        )

    @property
    def window(self) -> int | None:
        """The sliding window of the first layer; None if it sees all rows."""
        for module in self.layers[0].modules():
            if size := getattr(module, "sliding_window", None):
                return int(size)
        return None

    def norm(self, width: int) -> nn.Module:
        """A norm as these layers have them, over `width` numbers."""
        return self.norm_class(width, eps=self.config.rms_norm_eps)

    def forward(
        self,
        states: Tensor,
        positions: Tensor,
        cache: Cache | None,
        mask: Tensor | None,
        **first: Tensor,
    ) -> Tensor:
        """The states after the last layer, [b, n, h]."""
        for index, layer in enumerate(self.layers):
            states = layer(
                states,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=self.rotations(states, positions),
                **{CACHE: cache},
                **(first if index == 0 else {}),
            )
            states = states[0] if isinstance(states, tuple) else states
        return states

    def rotations(self, states: Tensor, positions: Tensor) -> Any:
        """Cosines and sines of positions int64 [b, n], in the type of `states`."""
        kinds = getattr(self.rotary, "rope_type", None)
        if isinstance(kinds, dict):  # frequencies of their own for each kind of layer
            kind = self.config.layer_types[0]
            return self.rotary(states, positions, layer_type=kind)
        return self.rotary(states, positions)

    def attend_with(self, implementation: str) -> None:
        """Choose the attention by its name in transformers' `AttentionInterface`."""
        for module in self.modules():
            config = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = implementation


class Ended(nn.Module):
    """A module between an embedding and an LM head, which a subclass sets."""

    embed_tokens: nn.Module
    lm_head: nn.Module

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, as models of transformers give it."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The LM head, as models of transformers give it."""
        return self.lm_head


def rotated(rows: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rows [b, heads, n, d], turned by cosines and sines [b, n, d]."""
    cosines, sines = turns
    turned: Tensor = rows * cosines[:, None] + rotate_half(rows) * sines[:, None]
    return turned


def own_layers(config: HeadConfig) -> HeadLayers:
    """The layers that a config describes: Llama's, or Qwen3's with norms of query and
    key. The first layer of an EAGLE head has its own form."""
    layer_class = Qwen3DecoderLayer if config.qk_norm else LlamaDecoderLayer
    family_config = _family_config(config)
    layers = [layer_class(family_config, i) for i in range(config.num_layers)]
    if config.family == EAGLE1:
        layers[0].input_layernorm = nn.Identity()
    if config.family == EAGLE3:
        layers[0] = _FirstLayer(layers[0], config)
    return HeadLayers(layers, LlamaRotaryEmbedding(family_config), family_config)


def _family_config(config: HeadConfig) -> Any:
    config_class = Qwen3Config if config.qk_norm else LlamaConfig
    return config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_act=config.hidden_act,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope),
        max_position_embeddings=config.max_positions,
        attention_bias=config.attention_bias,
        **({} if config.qk_norm else {"mlp_bias": config.mlp_bias}),
        bos_token_id=None,
        eos_token_id=None,
    )


class _FirstLayer(nn.Module):
    """EAGLE-3's first layer: attention reads the embedding beside the feature."""

    def __init__(self, layer: Any, config: HeadConfig) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(
                2 * config.hidden_size, narrow.out_features, config.attention_bias
            )
            setattr(self.self_attn, name, wide)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, features: Tensor, embedded: Tensor, **attention: Any) -> Tensor:
        """Features and embeddings [b, n, h] to states [b, n, h]."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        states = residual + self.self_attn(joined, **attention)[0]
        output: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output


def target_layers(model: Any, count: int) -> HeadLayers:
    """New layers of the target's kind, of which the head can keep keys and values.

    Raises `UnsupportedModelError` for a target whose layers cannot be made.
    """
    config = copy.deepcopy(model.config.get_text_config(decoder=True))
    config.num_hidden_layers = count
    if hasattr(config, "layer_types"):
        kinds = getattr(config, "mtp_layer_types", None)
        config.layer_types = list(kinds or ["full_attention"] * count)
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # all layers after the dense ones have experts
    if hasattr(config, "mlp_layer_types"):
        kinds = getattr(config, "mtp_mlp_layer_types", None)
        config.mlp_layer_types = list(kinds or ["sparse"] * count)
    layer_class = type(decoder_layers(model)[-1])
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    try:
        layers = [layer_class(config, index) for index in range(count)]
    except Exception as error:  # an unknown architecture may raise anything
        raise UnsupportedModelError(
            f"no MTP layer can be made of {layer_class.__name__} ({error}); export "
            "without the head"
        ) from error
    if rotary is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no rotary embedding, so its MTP layer cannot "
            "be made; export without the head"
        )
    return HeadLayers(layers, copy.deepcopy(rotary), config)
