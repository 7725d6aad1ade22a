"""The fields that heads of several families have, from their configs and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import D2T, MOST_PADDING, ids_of
from jetdraft.checkpoints.heads.head_keys import activation, number, positive, rope_of
from jetdraft.errors import CheckpointError

FIRST_LAYER = "layers.0."
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


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
    """The size of the target's vocabulary; the head's may have another padding."""
    check_size(source, number(source, config, "vocab_size"), target)
    return target.vocab_size


def check_size(source: str, size: int, target: Checkpoint) -> None:
    """Raise `CheckpointError` for a head of another vocabulary than the target's."""
    if abs(size - target.vocab_size) > MOST_PADDING:
        raise CheckpointError(
            f"{source} is for a vocabulary of {size} tokens, but {target.source} has "
            f"{target.vocab_size}; give the head of this target"
        )


def mapped_ids(
    source: str, config: dict[str, Any], tensors: dict[str, Tensor], target: Checkpoint
) -> Tensor | None:
    """The target's id of each row of the LM head; the file has offsets to the row.

    None if the rows are the target's. An embedding and an LM head with another padding
    get the target's padding, and copies of the target's own matrices are left out.
    """
    own, size = number(source, config, "vocab_size"), target.vocab_size
    rows = config.get("draft_vocab_size") or own
    if D2T not in tensors and rows != own:
        raise CheckpointError(
            f"{source} drafts from {rows} of {own} tokens but has no d2t that names "
            "them; fetch it again"
        )
    if own != size:
        _fit(tensors, EMBEDDING, own, target.model.get_input_embeddings().weight)
    if D2T in tensors:
        return _known(tensors, ids_of(source, tensors, rows, own), size)
    if own != size:
        _fit(tensors, HEAD, own, target.model.get_output_embeddings().weight)
    if own >= size or HEAD not in tensors:
        return None
    return _known(tensors, torch.arange(size), own)


def fit_heads(source: str, tensors: dict[str, Tensor], target: Checkpoint) -> int:
    """The number of tokens that LM heads choose among, the first of the target's.

    Heads in `tensors` lose the rows beyond them.
    """
    first, rows = tensors.get("lm_heads.0.weight"), target.vocab_size
    if first is None or first.ndim != 2:
        raise CheckpointError(f"{source} has no first LM head; fetch it again")
    own = len(first)
    check_size(source, own, target)
    for name, rows_of_head in tensors.items():
        if name.startswith("lm_heads.") and len(rows_of_head) > rows:
            tensors[name] = rows_of_head[:rows]
    return min(own, rows)


def padded(table: Tensor, rows: int) -> Tensor:
    """A table of that many rows: without its last, or with zeros behind them."""
    known = table[:rows]
    return F.pad(known, (0, 0, 0, rows - len(known)))


def _fit(tensors: dict[str, Tensor], name: str, own: int, theirs: Tensor) -> None:
    """Give a table of `own` rows as many as the target's `theirs`."""
    table = tensors.get(name)
    if table is None or table.ndim != 2 or len(table) != own:
        return  # filling the head says what is wrong
    shared = theirs.detach()[:own].float()
    if torch.equal(table[: len(theirs)].float(), shared):
        del tensors[name]
    else:
        tensors[name] = padded(table, len(theirs))


def _known(tensors: dict[str, Tensor], ids: Tensor, size: int) -> Tensor:
    """The ids below `size`; an LM head in `tensors` loses the rows of the others."""
    known = ids < size
    if HEAD in tensors and len(tensors[HEAD]) == len(ids):
        tensors[HEAD] = tensors[HEAD][known]
    return ids[known]
