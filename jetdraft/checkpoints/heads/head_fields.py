"""The fields that heads of several families have, from their configs and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import D2T, ids_of
from jetdraft.checkpoints.heads.head_keys import activation, number, positive, rope_of
from jetdraft.errors import CheckpointError

FIRST_LAYER = "layers.0."


def layer_fields(
    source: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The fields that say what the layers are.

    Published configs have a wrong head_dim, or the target's number of layers, so the
    tensors say both.
    """
    hidden, heads = (
        number(source, config, name) for name in ("hidden_size", "num_attention_heads")
    )
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    query = tensors.get(f"{FIRST_LAYER}self_attn.q_proj.weight")
    if query is None or query.shape[0] % heads:
        raise CheckpointError(
            f"{source} has no q_proj of {heads} heads in its first layer; fetch it "
            "again"
        )
    return {
        "hidden_size": hidden,
        "num_layers": len(layers),
        "num_heads": heads,
        "num_kv_heads": number(source, config, "num_key_value_heads", heads),
        "head_dim": query.shape[0] // heads,
        "intermediate_size": number(source, config, "intermediate_size"),
        "hidden_act": activation(source, config),
        "rms_norm_eps": positive(source, config, "rms_norm_eps", 1e-6),
        "rope": rope_of(source, config),
        "max_positions": number(source, config, "max_position_embeddings", 2048),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "qk_norm": f"{FIRST_LAYER}self_attn.q_norm.weight" in tensors,
    }


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are not the target's, by their names in a drafter's module."""
    return {
        f"stack.{name}" if name.startswith("layers.") else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("lm_head.", "embed_tokens."))
    }


def target_size(source: str, config: dict[str, Any], target: Checkpoint) -> int:
    """The target's hidden size, which must be the size that the head reads."""
    size = target.model.config.get_text_config(decoder=True).hidden_size
    reads = config.get("target_hidden_size") or number(source, config, "hidden_size")
    if reads != size:
        raise CheckpointError(
            f"{source} reads states of {reads} numbers, but {target.source} has "
            f"{size}; give the head of this target"
        )
    return int(size)


def vocabulary_size(source: str, config: dict[str, Any], target: Checkpoint) -> int:
    """The size of the vocabulary, which must be the target's."""
    size = number(source, config, "vocab_size")
    if size != target.vocab_size:
        raise CheckpointError(
            f"{source} is for a vocabulary of {size} tokens, but {target.source} has "
            f"{target.vocab_size}; give the head of this target"
        )
    return size


def mapped_ids(
    source: str, config: dict[str, Any], tensors: dict[str, Tensor], vocab_size: int
) -> Tensor | None:
    """The target's id of each row of the LM head; the file has offsets to the row."""
    rows = config.get("draft_vocab_size") or vocab_size
    if D2T not in tensors:
        if rows != vocab_size:
            raise CheckpointError(
                f"{source} drafts from {rows} of {vocab_size} tokens but has no d2t "
                "that names them; fetch it again"
            )
        return None
    return ids_of(source, tensors, rows, vocab_size)
