"""New heads for a target, and the layouts in which they are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import map_of
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.methods.eagle.module import Eagle, EagleConfig
from jetdraft.methods.medusa.module import Medusa, MedusaConfig

EAGLE1, EAGLE3, MEDUSA = "eagle1", "eagle3", "medusa"
ARCHITECTURES = {EAGLE1: "LlamaForCausalLMEagle", EAGLE3: "LlamaForCausalLMEagle3"}


def new_config(
    target: Checkpoint,
    family: str,
    taps: tuple[int, ...],
    vocabulary: int,
    slots: int,
    inner: int = 0,
) -> EagleConfig | MedusaConfig:
    """The config of a head as wide as the target, with a layer of its sizes.

    `inner` is the width inside its MLP; 0 is the target's.
    """
    config = config_of(target)
    if family == MEDUSA:
        return config.extended(MedusaConfig, draft_vocab_size=vocabulary, slots=slots)
    return config.extended(
        EagleConfig,
        draft_vocab_size=vocabulary,
        taps=taps,
        intermediate_size=inner or config.intermediate_size,
        final_norm=family == EAGLE3,
        eagle3=family == EAGLE3,
    )


def config_of(target: Checkpoint) -> HeadConfig:
    """A config with the sizes, vocabulary and positions of the target."""
    text = target.model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    head_dim = getattr(text, "head_dim", None)
    return HeadConfig(
        hidden_size=text.hidden_size,
        target_hidden_size=text.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim or text.hidden_size // text.num_attention_heads,
        intermediate_size=text.intermediate_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        # Without the target's scaling: a head reads few rows back.
        rope={
            "rope_type": "default",
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        },
        max_positions=text.max_position_embeddings,
    )


def layer_fields(config: HeadConfig) -> dict[str, Any]:
    """The fields of config.json that describe a head's layers."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
    }


def new_head(
    target: Checkpoint, config: EagleConfig | MedusaConfig, ids: Tensor | None
) -> Eagle | Medusa:
    """An untrained head.

    LM heads start as the target's rows, and Medusa's blocks at zero (2.2.1), so that
    its heads begin with the target's own next token.
    """
    rows = target.model.get_output_embeddings().weight.detach().float()
    if isinstance(config, MedusaConfig):
        medusa = Medusa(config)
        for weight in medusa.lm_heads.parameters():
            weight.data.copy_(rows)
        for weight in medusa.blocks.parameters():
            nn.init.zeros_(weight)
        return medusa
    head = Eagle(config, target.model)
    head.ids = ids
    if config.eagle3:
        size = config.draft_vocab_size
        head.lm_head = nn.Linear(config.hidden_size, size, bias=False)
        head.lm_head.weight.data.copy_(rows if ids is None else rows[ids])
    return head


def trained_weights(head: nn.Module, target: Checkpoint) -> dict[str, Tensor]:
    """What is trained: all that is not the target's."""
    of_target = {id(weight) for weight in target.model.parameters()}
    return {
        name: weight
        for name, weight in head.named_parameters()
        if id(weight) not in of_target
    }


def published(
    config: EagleConfig | MedusaConfig,
    weights: Mapping[str, Tensor],
    ids: Tensor | None,
    half: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as authors publish them, in float16 if `half`."""
    dtype = torch.float16 if half else torch.float32
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    if isinstance(config, MedusaConfig):
        return _medusa(config, weights)
    prefix = "midlayer." if config.eagle3 else "layers.0."
    tensors = {
        name.replace("stack.layers.0.", prefix): weight.contiguous()
        for name, weight in weights.items()
    }
    if ids is not None:
        tensors |= map_of(ids, config.vocab_size)
    stored = {"torch_dtype": str(dtype).removeprefix("torch.")}
    return _eagle_json(config) | stored, tensors


def _eagle_json(config: EagleConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[EAGLE3 if config.eagle3 else EAGLE1]],
        "model_type": "llama",
        **layer_fields(config),
        "tie_word_embeddings": False,
    }
    if not config.eagle3:
        return fields | {"bias": config.fc_bias}
    # Ids inside eagle_config name layers by their output.
    outputs = [tap - 1 for tap in config.taps]
    return fields | {
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": outputs,
            "use_aux_hidden_state": True,
        },
    }


def _medusa(
    config: MedusaConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    fields = {"medusa_num_heads": config.slots, "medusa_num_layers": config.blocks}
    tensors = {}
    for name, weight in weights.items():
        kind, head, rest = name.split(".", 2)
        if kind == "lm_heads":
            tensors[f"{head}.{config.blocks}.weight"] = weight.contiguous()
        else:
            block, part = rest.split(".")
            tensors[f"{head}.{block}.linear.{part}"] = weight.contiguous()
    return fields, tensors
