"""Reads EAGLE heads: what their configs and tensors say in each published layout.

EAGLE-1 and 2 share their weights. EAGLE-3 comes from its authors, SpecForge and
AngelSlim in a flat config, and from speculators in a flat or a nested config.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import D2T, T2D
from jetdraft.checkpoints.heads.head_config import EAGLE1, EAGLE3, HeadConfig
from jetdraft.checkpoints.heads.head_fields import (
    FIRST_LAYER,
    layer_fields,
    mapped_ids,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import (
    EAGLE1_KEYS,
    EAGLE3_KEYS,
    SPECULATORS_KEYS,
    check_keys,
)
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.errors import CheckpointError

_NEVER_READ = (T2D, D2T, "verifier_")


def eagle_tensors(files: HeadFiles) -> dict[str, Tensor]:
    """The tensors under the names of speculators, whatever wrote the file."""
    tensors = {}
    for name, tensor in files.tensors.items():
        plain = name.removeprefix("model.")
        if plain.startswith("midlayer."):
            plain = FIRST_LAYER + plain.removeprefix("midlayer.")
        if ".rotary_emb." not in plain:  # frequencies that old files have
            tensors[plain] = tensor
    return tensors


def is_eagle3(tensors: dict[str, Tensor]) -> bool:
    """Whether the attention reads embedding and feature side by side."""
    return f"{FIRST_LAYER}hidden_norm.weight" in tensors


def is_model(tensors: dict[str, Tensor]) -> bool:
    """Whether these are the layers of a whole model: no fc joins what they read."""
    has_norm = f"{FIRST_LAYER}input_layernorm.weight" in tensors  # EAGLE-1 has none
    return has_norm and "fc.weight" not in tensors and not is_eagle3(tensors)


def eagle_layer(files: HeadFiles) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The family, its flat config, and the fields that say what the layers are.

    Raises `CheckpointError` for a config that no target could make right.
    """
    tensors = eagle_tensors(files)
    family = EAGLE3 if is_eagle3(tensors) else EAGLE1
    config = _plain_config(files, family)
    return family, config, layer_fields(files.source, config, tensors)


def read_eagle(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor], Tensor | None]:
    """The config, the tensors to load, and the target's id of each row of the LM head.

    The ids are int64 [draft vocabulary], or None if the rows are the target's. Raises
    `CheckpointError` for a head that does not fit the target.
    """
    tensors = eagle_tensors(files)
    family, config, fields = eagle_layer(files)
    fields["target_hidden_size"] = target_size(files.source, config, target)
    fields["vocab_size"] = vocabulary_size(files.source, config, target)
    ids = mapped_ids(files.source, config, tensors, target)
    fields["draft_vocab_size"] = target.vocab_size if ids is None else len(ids)
    if family == EAGLE3:
        layers = len(decoder_layers(target.model))
        flags = _eagle3_flags(files, config) | {"taps": _taps(files, config, layers)}
    else:
        flags = _eagle1_flags(config)
    head = HeadConfig(family=family, **fields, **flags)
    _check_fc(files.source, head, tensors)
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_NEVER_READ)
    }
    if not head.final_norm and not head.carries_normed:
        kept.pop("norm.weight", None)  # SpecForge saves the norm that it does not use
    return head, {_module_name(name): tensor for name, tensor in kept.items()}, ids


def _plain_config(files: HeadFiles, family: str) -> dict[str, Any]:
    """One flat config of known keys; a nested config gives its layer's keys too."""
    outer = dict(files.config)
    if outer.get("model_type") == "eagle" and isinstance(outer.get("model"), dict):
        outer = outer["model"]  # as old versions of vLLM wrapped it
    keys = EAGLE3_KEYS if family == EAGLE3 else EAGLE1_KEYS
    if not files.is_speculators:
        check_keys(files.source, outer, keys)
        return outer
    if family != EAGLE3:
        raise CheckpointError(
            f"{files.source} is no EAGLE-3 head, though speculators says so; fetch it "
            "again"
        )
    check_keys(files.source, outer, keys | SPECULATORS_KEYS)
    layer = outer.get("transformer_layer_config") or {}
    check_keys(files.source, layer, keys)
    return {**outer, **layer}


def _eagle1_flags(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "fc_bias": config.get("bias") is not False,  # without the key it has a bias
        "join_norms": bool(config.get("add_para_norm")),
        "final_norm": False,
    }


def _eagle3_flags(files: HeadFiles, config: dict[str, Any]) -> dict[str, Any]:
    """The flags of the numerics; `norm_output` means two things."""
    nested = "transformer_layer_config" in files.config
    before_residual = config.get("norm_before_residual")
    output = config.get("norm_output")
    return {
        "norm_before_residual": nested if before_residual is None else before_residual,
        "norm_before_fc": bool(config.get("norm_before_fc")),
        "fc_norm": bool(config.get("fc_norm")),
        # speculators feeds the normed state back; SpecForge norms before the LM head.
        "carries_normed": files.is_speculators and bool(output),
        "final_norm": files.is_speculators or output is not False,
    }


def _taps(files: HeadFiles, config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The taps as indices of the stream that enters a layer, as the list has them.

    Ids inside `eagle_config` name layers by their output, all others by their input.
    """
    nested = config.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    unknown = nested.keys() - {name, "use_aux_hidden_state"}
    if unknown or nested.get("use_aux_hidden_state") is False:
        wrong = sorted(unknown) or ["use_aux_hidden_state=False"]
        raise CheckpointError(
            f"the eagle_config of {files.source} has {', '.join(wrong)}, which "
            "jetdraft does not know; give another head"
        )
    ids = config.get(name) or config.get("aux_hidden_state_layer_ids")
    if nested.get(name):
        ids = [index + 1 for index in nested[name]]
    taps = tuple(ids or (2, layers // 2, layers - 3))
    if any(not 0 <= tap <= layers for tap in taps):
        raise CheckpointError(
            f"{files.source} reads the target at {list(taps)}, but its {layers} layers "
            f"give 0 to {layers}; give the head of this target"
        )
    return taps


def _check_fc(source: str, head: HeadConfig, tensors: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` for an fc of another width than the head's inputs."""
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{source} has no fc.weight; fetch it again")
    width = tensors["fc.weight"].shape[1]
    joined = 2 * head.hidden_size
    if head.family == EAGLE3:
        joined = len(head.taps) * head.target_hidden_size
    if width != joined:
        raise CheckpointError(
            f"the fc of {source} reads {width} numbers, but {len(head.taps) or 2} "
            f"states of this target have {joined}; give the head of this target"
        )


def _module_name(name: str) -> str:
    """The name in `Head` of a tensor under its name in speculators."""
    renamed = {
        "embedding_layernorm": "embedding_norm",
        "hidden_states_layernorm": "hidden_norm",
    }
    first, _, rest = name.partition(".")
    return (
        f"stack.{name}" if first == "layers" else f"{renamed.get(first, first)}.{rest}"
    )
