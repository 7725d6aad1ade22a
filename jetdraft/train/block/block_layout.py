"""New drafters of blocks for a target, and the layouts in which they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.blocks import BlockConfig, BlockDrafter
from jetdraft.checkpoints.heads.head_layers import HeadConfig
from jetdraft.methods.dflash.module import Dflash
from jetdraft.methods.diffusion.module import MODEL_TYPE, Diffusion
from jetdraft.train.head.head_layout import config_of, layer_fields

SPREAD = 0.02
"""The standard deviation of new embeddings, as in the first GPT."""


def dflash_config(
    target: Checkpoint, layers: int, taps: Sequence[int], slots: int, mask_token: int
) -> BlockConfig:
    """The config of a DFlash head: layers of the target's sizes, with Qwen3's norms."""
    return config_of(target).extended(
        BlockConfig,
        num_layers=layers,
        taps=tuple(taps),
        slots=slots,
        qk_norm=True,
        mask_token=mask_token,
    )


def diffusion_config(
    target: Checkpoint, layers: int, width: int, slots: int
) -> BlockConfig:
    """The config of a diffusion drafter of that width, with heads of 16 to 64."""
    head_dim = next(size for size in (64, 32, 16) if width % size == 0)
    return config_of(target).extended(
        BlockConfig,
        hidden_size=width,
        target_hidden_size=width,
        num_layers=layers,
        num_heads=width // head_dim,
        num_kv_heads=width // head_dim,
        head_dim=head_dim,
        intermediate_size=3 * width,
        rms_norm_eps=HeadConfig.rms_norm_eps,
        slots=slots,
        qk_norm=True,
    )


def new_block_drafter(target: Checkpoint, config: BlockConfig) -> BlockDrafter:
    """An untrained drafter."""
    drafter: BlockDrafter = (Dflash if config.taps else Diffusion)(config, target.model)
    if isinstance(drafter, Diffusion):
        for weight in (drafter.embed_tokens.weight, drafter.mask):
            assert isinstance(weight, Tensor)
            nn.init.normal_(weight, std=SPREAD)
    return drafter


def written(
    config: BlockConfig, weights: Mapping[str, Tensor], half: bool, target_layers: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors as DFlash's authors publish them, or jetdraft's own."""
    dtype = torch.float16 if half else torch.float32
    tensors = {
        name.removeprefix("stack."): weight.to(dtype).contiguous()
        for name, weight in weights.items()
    }
    stored = {"dtype": str(dtype).removeprefix("torch.")}
    fields = layer_fields(config) | stored
    if not config.taps:
        own = {"model_type": MODEL_TYPE, "block_size": config.slots}
        return fields | own, tensors
    return fields | _dflash_fields(config, target_layers), tensors


def _dflash_fields(config: BlockConfig, target_layers: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.slots + 1,
        "num_target_layers": target_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
        "dflash_config": {
            "mask_token_id": config.mask_token,
            # Its ids name layers by their output.
            "target_layer_ids": [tap - 1 for tap in config.taps],
        },
    }
