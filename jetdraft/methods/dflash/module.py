"""DFlash (2602.06036): a head that fills a block from the states of its target.

Ids of layers name outputs in its authors' and SpecForge's configs, inputs in
speculators' configs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.blocks import BlockConfig, BlockDrafter, read_block_size
from jetdraft.checkpoints.heads.draft_module import Reads
from jetdraft.checkpoints.heads.head_files import LAYER_KEYS, SPECULATOR_KEYS, HeadFiles
from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.errors import CheckpointError

_NESTED_KEYS = {"mask_token_id", "target_layer_ids"}  # Or beside `dflash_config`.
# Flags of DFlash's descendants, with their values for off.
_SPECULATOR_KEYS = SPECULATOR_KEYS | {
    *("draft_vocab_size", "block_size", "target_hidden_size", "mask_token_id"),
    "aux_hidden_state_layer_ids",
    # Only Domino and the training read these.
    *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf"),
}
_OFF = {
    "sample_from_anchor": False,
    "projector_type": "dflash",
    "shift_label": False,
    "sliding_window_non_causal": False,
}


class Dflash(BlockDrafter):
    """A head with the target's embedding, and its LM head unless it has its own."""

    published = "DFlash"
    speculators = "dflash"
    reads = Reads(features=True, guesses=True, anchored=True)
    keys = LAYER_KEYS | {
        *("block_size", "num_target_layers", "dflash_config", "mask_token_id"),
        *("target_layer_ids", "target_hidden_size"),
    }
    has_own_matrices = True
    fusion_names = ("fc", "hidden_norm")

    def __init__(self, config: BlockConfig, target: Any) -> None:
        super().__init__(config, target)
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        joined = len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(joined, config.hidden_size, bias=False)
        self.hidden_norm = self.stack.norm(config.hidden_size)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        states = [state.to(self.fc.weight.dtype) for state in taps]
        features: Tensor = self.hidden_norm(self.fc(torch.cat(states, dim=-1)))
        return features

    def embed(self, tokens: Tensor) -> Tensor:
        is_mask = tokens >= self.config.vocab_size
        rows: Tensor = self.embed_tokens(
            torch.where(is_mask, self.config.mask_token, tokens)
        )
        return rows

    @classmethod
    def recognizes(cls, files: HeadFiles) -> bool:
        config = files.config
        of_speculators = config.get("speculators_model_type") == cls.speculators
        named = files.architecture == "DFlashDraftModel"
        return named or of_speculators or "dflash_config" in config

    @classmethod
    def configure(
        cls, files: HeadFiles, target: Checkpoint, tensors: dict[str, Tensor]
    ) -> tuple[BlockConfig, Tensor | None]:
        files = cls._flatten_config(files)
        _check_target(files, target)
        fields = files.fields_beside(tensors, target)
        layers = len(decoder_layers(target.model))
        taps = _read_taps(files, fields["num_layers"], layers)
        joined = len(taps) * fields["target_hidden_size"]
        files.check_fusion(tensors, joined, "its taps")
        ids = files.mapped_ids(tensors, target)
        config_of_head = BlockConfig(
            draft_vocab_size=target.vocab_size if ids is None else len(ids),
            taps=taps,
            slots=read_block_size(files, least=2) - 1,
            mask_token=_read_mask_token(files, target),
            **fields,
        )
        return config_of_head, ids

    @classmethod
    def _flatten_config(cls, files: HeadFiles) -> HeadFiles:
        """Return the files with one flat config; refuses unknown keys."""
        config = files.config
        nested = config.get("dflash_config") or {}
        if not isinstance(nested, dict) or nested.keys() - _NESTED_KEYS:
            raise CheckpointError(
                f"the dflash_config of {files.source} is {nested!r}; jetdraft knows "
                f"{' and '.join(sorted(_NESTED_KEYS))} in it"
            )
        if not files.is_speculators:
            files.check_keys(cls.keys)
            return files.configured({**config, **nested})
        on = {n: v for n, v in config.items() if n not in _OFF or v != _OFF[n]}
        files.configured(on).check_keys(_SPECULATOR_KEYS)
        layer = config.get("transformer_layer_config") or {}
        files.configured(layer).check_keys(cls.keys)
        return files.configured({**config, **layer})


def default_output_layers(count: int, layers: int) -> list[int]:
    """Choose layers whose outputs a head reads: (5, 36) is [1, 9, 17, 25, 33]."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _check_target(files: HeadFiles, target: Checkpoint) -> None:
    """Raise `CheckpointError` for another count of layers, or a scaled embedding."""
    layers = len(decoder_layers(target.model))
    meant = files.config.get("num_target_layers") or layers
    if meant != layers:
        raise CheckpointError(
            f"{files.source} is for a target of {meant} layers, but {target.source} "
            f"has {layers}; give the head of this target"
        )
    embedding = target.model.get_input_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        raise CheckpointError(
            f"{target.source} has a {type(embedding).__name__}, and DFlash reads plain "
            "embeddings only; export without the head"
        )


def _read_taps(files: HeadFiles, own: int, layers: int) -> tuple[int, ...]:
    """Read the taps in the order of the config; tap i is what layer i reads."""
    if files.is_speculators:
        ids = files.config.get("aux_hidden_state_layer_ids")
    else:
        ids = files.config.get("target_layer_ids") or default_output_layers(own, layers)
    shift = 0 if files.is_speculators else 1
    known = isinstance(ids, list) and all(type(index) is int for index in ids)
    taps = tuple(index + shift for index in ids or ()) if known else ()
    if not taps or any(not 0 <= tap <= layers for tap in taps):
        raise CheckpointError(
            f"{files.source} reads the target at {ids}, but its {layers} layers give "
            f"{1 - shift} to {layers - shift}; give the head of this target"
        )
    return taps


def _read_mask_token(files: HeadFiles, target: Checkpoint) -> int:
    """Return the token whose embedding stands for a mask; raise `CheckpointError`."""
    token = files.config.get("mask_token_id")
    if type(token) is not int or not 0 <= token < target.vocab_size:
        raise CheckpointError(
            f"the config of {files.source} has mask_token_id={token!r}, but "
            f"{target.source} embeds the tokens 0 to {target.vocab_size - 1}; give the "
            "head of this target"
        )
    return token
