"""The keys of a head's config: what is read, what has no effect, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from jetdraft.errors import CheckpointError, printable

_LAYER = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
    "model_type",
}
EAGLE1_KEYS = _LAYER | {"bias", "add_para_norm"}
EAGLE3_KEYS = _LAYER | {
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "norm_before_fc",
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
}
SPECULATORS_KEYS = {
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "embed_requires_grad",
}

DFLASH_KEYS = _LAYER | {
    "block_size",
    "num_target_layers",
    "dflash_config",
    "mask_token_id",
    "target_layer_ids",
    "target_hidden_size",
}
SPECULATORS_DFLASH_KEYS = SPECULATORS_KEYS | {
    "draft_vocab_size",
    "block_size",
    "target_hidden_size",
    "aux_hidden_state_layer_ids",
    "mask_token_id",
    # Only Domino and the training read these.
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
    "lambda_base_start",
    "lambda_base_decay_ratio",
    "auf",
}
DIFFUSION_KEYS = _LAYER | {"block_size"}
CHIMERA_KEYS = _LAYER
FALCON_KEYS = _LAYER | {"block_size"}
GLIDE_KEYS = _LAYER
SOURCE_KEYS = {"model_type", "target_type", "target_words", "block_size"}
KANGAROO_KEYS = _LAYER | {"exit_layer"}

_WITHOUT_EFFECT = {
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_window_layers",  # means nothing without use_sliding_window
    "num_hidden_layers",  # some files have the target's; the tensors are counted
    "pad_token_id",
    "pretraining_tp",
    "tie_word_embeddings",  # the tensors say it
    "torch_dtype",
    "use_cache",
    "_name_or_path",
    "name_or_path",
    *PreTrainedConfig().to_dict(),
}

_OFF = {"use_sliding_window": False, "sliding_window": None, "qkv_bias": False}
"""Keys that jetdraft knows and cannot compute, with their values for off."""


def check_keys(source: str, config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `CheckpointError` for a key that is unknown, by its name."""
    off = {name for name, value in _OFF.items() if config.get(name, value) == value}
    unknown = config.keys() - set(known) - _WITHOUT_EFFECT - off - {"layer_types"}
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        unknown.add("layer_types")
    if unknown:
        names = ", ".join(
            f"{printable(name, 60)}={printable(repr(config[name]), 60)}"
            for name in sorted(unknown)[:9]
        )
        raise CheckpointError(
            f"the config of {source} has {names}, which jetdraft does not know; a head "
            "is never read in part, so give another head"
        )


def number(source: str, config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """A positive whole number of a config; 0 as default means that it must be there."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        fact = f"{name}={config[name]!r}" if name in config else f"no {name}"
        raise CheckpointError(
            f"the config of {source} has {fact}; it needs a whole number from 1 on"
        )
    return value


def positive(
    source: str, config: Mapping[str, Any], name: str, default: float
) -> float:
    """A number above 0 of a config; raises `CheckpointError` for any other value."""
    value = config.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (0 < value < math.inf):
        raise CheckpointError(
            f"the config of {source} has {name}={printable(repr(value), 60)}; it needs "
            "a number above 0"
        )
    return float(value)


def activation(source: str, config: Mapping[str, Any]) -> str:
    """The name of the activation, which transformers must know; silu by default."""
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACT2FN:
        raise CheckpointError(
            f"the config of {source} has hidden_act={printable(repr(name), 60)}; it "
            "needs an activation of transformers, for example silu or gelu"
        )
    return name


def rope_of(source: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding that a config names, as transformers 5 writes it.

    Without `rope_theta` it is 10000, whatever the target's is.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise CheckpointError(
            f"the config of {source} has rope_scaling={scaling!r}; it must be an object"
        )
    rope = {"rope_theta": config.get("rope_theta"), **scaling}
    rope["rope_theta"] = positive(source, rope, "rope_theta", 10000.0)
    if "factor" in rope:
        rope["factor"] = positive(source, rope, "factor", 1.0)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return rope
