"""The contract of a drafter of one layer, beside that of its target."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from jetdraft.checkpoints.heads.head_config import HeadConfig
from jetdraft.contracts.step_contract import StepContract


def layer_contract(
    config: HeadConfig, ids: Tensor | None, target: StepContract, dtype: str
) -> StepContract:
    """What the graphs of all drafters of one layer have; `ids` is a draft vocabulary.

    layer_contract(drafter.config, drafter.ids, target, "float32")
    """
    return replace(
        target,
        dtype=dtype,
        kv_shapes=((config.num_kv_heads, config.head_dim),),
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        draft_vocab=0 if ids is None else len(ids),
        spare_slots=0,
    )
