"""DFlash (2602.06036): a head that fills a block from the states of its target.

Its context are features, and its block begins with the last token. It comes from its
authors and from SpecForge in a flat config, whose ids of layers name their outputs, and
from speculators, whose ids name their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.draft_vocabulary import D2T, T2D
from jetdraft.checkpoints.heads.blocks import BlockConfig, BlockDrafter, block_size
from jetdraft.checkpoints.heads.draft_module import Reads
from jetdraft.checkpoints.heads.head_files import (
    LAYER_KEYS,
    SPECULATORS_KEYS,
    HeadFiles,
    check_fusion,
    check_keys,
    layer_fields,
    mapped_ids,
    target_size,
    vocabulary_size,
)
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import CheckpointError

_NESTED = {"mask_token_id", "target_layer_ids"}
"""Keys that DFlash has in its `dflash_config`, or beside it."""

_SPECULATORS_KEYS = SPECULATORS_KEYS | {
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
_OFF = {
    "sample_from_anchor": False,
    "projector_type": "dflash",
    "shift_label": False,
    "sliding_window_non_causal": False,
}
"""Flags of DFlash's descendants, with their values for off."""


class Dflash(BlockDrafter):
    """A head with the target's embedding, and its LM head unless it has its own.

    context = head.fuse(taps)               # in the target's graph
    states = head(context, block, positions, masked(mask))
    """

    published = "DFlash"
    speculators = "dflash"
    reads = Reads(features=True, guesses=True, anchored=True)
    keys = LAYER_KEYS | {
        "block_size",
        "num_target_layers",
        "dflash_config",
        "mask_token_id",
        "target_layer_ids",
        "target_hidden_size",
    }
    brings_matrices = True
    fused = ("fc", "hidden_norm")

    def __init__(self, config: BlockConfig, target: Any) -> None:
        super().__init__(config, target)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        joined = len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(joined, config.hidden_size, bias=False)
        self.hidden_norm = self.stack.norm(config.hidden_size)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Features [b, n, h] of the target's states [b, n, target hidden] at the taps.

        In the type of fc's weight, which should be float32: in float16 they overflow.
        """
        states = [state.to(self.fc.weight.dtype) for state in taps]
        features: Tensor = self.hidden_norm(self.fc(torch.cat(states, dim=-1)))
        return features

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings [b, n, h] of tokens; that of the mask's token for masks."""
        is_mask = tokens >= self.config.vocab_size
        rows: Tensor = self.embed_tokens(
            torch.where(is_mask, self.config.mask_token, tokens)
        )
        return rows

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        """Whether the config is one of DFlash's layouts."""
        config = files.config
        of_speculators = config.get("speculators_model_type") == cls.speculators
        named = files.architecture == "DFlashDraftModel"
        return named or of_speculators or "dflash_config" in config

    @classmethod
    def configure(
        cls, files: HeadFiles, target: Checkpoint, tensors: dict[str, Tensor]
    ) -> tuple[BlockConfig, Tensor | None]:
        """The config and the draft vocabulary; raises `CheckpointError`."""
        source, config = files.source, cls._flat_config(files)
        _check_target(source, config, target)
        fields = layer_fields(source, config, tensors)
        layers = len(decoder_layers(target.model))
        taps = _taps(files, config, fields["num_layers"], layers)
        width = target_size(source, config, target)
        check_fusion(source, tensors, len(taps) * width, "its taps")
        ids = mapped_ids(source, config, tensors, target)
        for name in [name for name in tensors if name.startswith((T2D, D2T))]:
            del tensors[name]
        config_of_head = BlockConfig(
            target_hidden_size=width,
            vocab_size=vocabulary_size(source, config, target),
            draft_vocab_size=target.vocab_size if ids is None else len(ids),
            taps=taps,
            slots=block_size(source, config, least=2) - 1,
            mask_token=_mask_token(source, config, target),
            **fields,
        )
        return config_of_head, ids

    @classmethod
    def _flat_config(cls, files: HeadFiles) -> dict[str, Any]:
        """One flat config of known keys, also of `dflash_config` and of the layer."""
        config = dict(files.config)
        nested = config.get("dflash_config") or {}
        if not isinstance(nested, dict) or nested.keys() - _NESTED:
            raise CheckpointError(
                f"the dflash_config of {files.source} is {nested!r}; jetdraft knows "
                f"{' and '.join(sorted(_NESTED))} in it"
            )
        if not files.is_speculators:
            check_keys(files.source, config, cls.keys)
            return {**config, **nested}
        on = {n: v for n, v in config.items() if n not in _OFF or v != _OFF[n]}
        check_keys(files.source, on, _SPECULATORS_KEYS)
        layer = config.get("transformer_layer_config") or {}
        check_keys(files.source, layer, cls.keys)
        return {**config, **layer}


def default_outputs(count: int, layers: int) -> list[int]:
    """The layers whose outputs a head of `count` layers reads, spread evenly.

    default_outputs(5, 36)    # [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


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
