"""Reads drafters that fill a block: DFlash in two layouts, and jetdraft's diffusion.

DFlash comes from its authors and SpecForge in a flat config, whose ids of layers name
their outputs, and from speculators, whose ids name their inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import D2T, T2D
from jetdraft.checkpoints.heads.head_config import DFLASH, DIFFUSION, HeadConfig
from jetdraft.checkpoints.heads.head_fields import (
    EMBEDDING,
    layer_fields,
    mapped_ids,
    padded,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import (
    DFLASH_KEYS,
    DIFFUSION_KEYS,
    SPECULATORS_DFLASH_KEYS,
    check_keys,
    number,
)
from jetdraft.checkpoints.streamed import decoder_layers
from jetdraft.errors import CheckpointError

MODEL_TYPE = "jetdraft-diffusion"
"""What the config of a diffusion drafter calls itself."""

_NEVER_READ = (T2D, D2T, "verifier_")
_NESTED = {"mask_token_id", "target_layer_ids"}
"""Keys that DFlash has in its `dflash_config`, or beside it."""


def is_dflash(files: HeadFiles) -> bool:
    """Whether the config is one of DFlash's layouts."""
    config = files.config
    named = (config.get("architectures") or [""])[0] == "DFlashDraftModel"
    of_speculators = config.get("speculators_model_type") == DFLASH
    return named or of_speculators or "dflash_config" in config


def is_diffusion(files: HeadFiles) -> bool:
    """Whether the folder has a diffusion drafter."""
    return files.config.get("model_type") == MODEL_TYPE


def read_block_drafter(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor], Tensor | None]:
    """The config, the tensors to load, and the target's id of each row of the LM head.

    The ids are int64 [draft vocabulary], or None if the rows are the target's. Raises
    `CheckpointError` for a drafter that does not fit the target.
    """
    tensors = {n.removeprefix("model."): t for n, t in files.tensors.items()}
    read = _dflash if is_dflash(files) else _diffusion
    fields, ids = read(files, tensors, target)
    fields["vocab_size"] = vocabulary_size(files.source, fields.pop("config"), target)
    fields["draft_vocab_size"] = target.vocab_size if ids is None else len(ids)
    kept = {
        f"stack.{name}" if name.startswith("layers.") else name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(_NEVER_READ)
    }
    return HeadConfig(**fields), kept, ids


def _dflash(
    files: HeadFiles, tensors: dict[str, Tensor], target: Checkpoint
) -> tuple[dict[str, Any], Tensor | None]:
    """The fields of a DFlash head but those of its vocabulary, and the ids."""
    source, config = files.source, _plain_config(files)
    _check_target(source, config, target)
    layer = layer_fields(source, config, tensors)
    taps = _taps(files, config, layer["num_layers"], len(decoder_layers(target.model)))
    width = target_size(source, config, target)
    _check_fc(source, tensors, len(taps) * width)
    ids = mapped_ids(source, config, tensors, target)
    fields = {
        "config": config,
        "family": DFLASH,
        "target_hidden_size": width,
        "taps": taps,
        "slots": _block_size(source, config, least=2) - 1,
        "mask_token": _mask_token(source, config, target),
        **layer,
    }
    return fields, ids


def _diffusion(
    files: HeadFiles, tensors: dict[str, Tensor], target: Checkpoint
) -> tuple[dict[str, Any], Tensor | None]:
    """The fields of a diffusion drafter without its vocabulary's, and the ids."""
    source, config = files.source, files.config
    check_keys(source, config, DIFFUSION_KEYS)
    own, rows = number(source, config, "vocab_size"), target.vocab_size
    table = tensors.get(EMBEDDING)
    if table is not None and len(table) == own:
        tensors[EMBEDDING] = padded(table, rows)
    fields = {
        "config": config,
        "family": DIFFUSION,
        "target_hidden_size": number(source, config, "hidden_size"),
        "slots": _block_size(source, config, least=1),
        **layer_fields(source, config, tensors),
    }
    return fields, torch.arange(own) if own < rows else None


def _plain_config(files: HeadFiles) -> dict[str, Any]:
    """One flat config of known keys, with those of `dflash_config` and of the layer."""
    config = dict(files.config)
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict) or nested.keys() - _NESTED:
        raise CheckpointError(
            f"the dflash_config of {files.source} is {nested!r}; jetdraft knows "
            f"{' and '.join(sorted(_NESTED))} in it"
        )
    if not files.is_speculators:
        check_keys(files.source, config, DFLASH_KEYS)
        return {**config, **nested}
    check_keys(files.source, _without_off(config), SPECULATORS_DFLASH_KEYS)
    layer = config.get("transformer_layer_config") or {}
    check_keys(files.source, layer, DFLASH_KEYS)
    return {**config, **layer}


_OFF = {
    "sample_from_anchor": False,
    "projector_type": "dflash",
    "shift_label": False,
    "sliding_window_non_causal": False,
}
"""Flags of DFlash's descendants, with their values for off."""


def _without_off(config: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in config.items() if n not in _OFF or v != _OFF[n]}


def _check_target(source: str, config: dict[str, Any], target: Checkpoint) -> None:
    """Refuse a head of a target with other layers or with a scaled embedding."""
    layers = len(decoder_layers(target.model))
    meant = config.get("num_target_layers") or layers
    if meant != layers:
        raise CheckpointError(
            f"{source} is for a target of {meant} layers, but {target.source} has "
            f"{layers}; give the head of this target"
        )
    embedding = target.model.get_input_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        raise CheckpointError(
            f"{target.source} has a {type(embedding).__name__}, and DFlash reads plain "
            "embeddings only; export without the head"
        )


def _taps(
    files: HeadFiles, config: dict[str, Any], own: int, layers: int
) -> tuple[int, ...]:
    """The taps as indices of the stream that enters a layer, as the list has them."""
    if files.is_speculators:
        ids = config.get("aux_hidden_state_layer_ids")
    else:
        ids = config.get("target_layer_ids") or default_outputs(own, layers)
    shift = 0 if files.is_speculators else 1
    known = isinstance(ids, list) and all(type(index) is int for index in ids)
    taps = tuple(index + shift for index in ids or ()) if known else ()
    if not taps or any(not 0 <= tap <= layers for tap in taps):
        raise CheckpointError(
            f"{files.source} reads the target at {ids}, but its {layers} layers give "
            f"{1 - shift} to {layers - shift}; give the head of this target"
        )
    return taps


def default_outputs(count: int, layers: int) -> list[int]:
    """The layers whose outputs a DFlash head of `count` layers reads, spread evenly.

    default_outputs(5, 36)    # [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _check_fc(source: str, tensors: dict[str, Tensor], joined: int) -> None:
    """Raise `CheckpointError` for an fc of another width than all taps together."""
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{source} has no fc.weight; fetch it again")
    width = tensors["fc.weight"].shape[1]
    if width != joined:
        raise CheckpointError(
            f"the fc of {source} reads {width} numbers, but its taps of this target "
            f"have {joined}; give the head of this target"
        )


def _block_size(source: str, config: dict[str, Any], least: int) -> int:
    size = number(source, config, "block_size")
    if not least <= size <= 64:
        raise CheckpointError(
            f"the config of {source} has block_size={size}; jetdraft fills blocks of "
            f"{least} to 64 tokens"
        )
    return size


def _mask_token(source: str, config: dict[str, Any], target: Checkpoint) -> int:
    """The token of a mask, of which the target must have an embedding."""
    token = config.get("mask_token_id")
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"the config of {source} has mask_token_id={token!r}, but {target.source} "
            f"embeds the tokens 0 to {target.vocab_size - 1}; give the head of this "
            "target"
        )
    return token
