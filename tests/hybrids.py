"""Tiny random checkpoints of families with recurrent states."""

from __future__ import annotations

from typing import Any

import transformers

from tests import tiny

SIZES = {**tiny.SIZES, "num_hidden_layers": 2}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
GROUPED = {**DELTA, "linear_num_value_heads": 4, "head_dim": 16}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
}  # fmt: skip

CONFIGS = {
    "lfm2": lambda: transformers.Lfm2Config(
        **{**SIZES, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SIZES, **GROUPED),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **SIZES, **GROUPED, num_experts=0
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **SIZES, **DELTA, linear_num_value_heads=2
    ),
    "bamba": lambda: transformers.BambaConfig(
        **SIZES, **MAMBA, attn_layer_indices=[1], mamba_expand=2
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, **MAMBA, mamba_d_ssm=128, head_dim=16
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SIZES, **MAMBA, layer_types=["mamba", "attention"], mamba_expand=2,
        num_local_experts=0, shared_intermediate_size=96,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 3},
        layers_block_type=["mamba", "attention", "mlp"], mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=16, expand=2, head_dim=16,
    ),
}  # fmt: skip
"""How a config of each family is made."""
