"""What a head is: its family, its sizes and the flags of its numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EAGLE1, EAGLE3, MTP, MEDUSA, HYDRA = "eagle1", "eagle3", "mtp", "medusa", "hydra"
DFLASH, DIFFUSION = "dflash", "diffusion"
KANGAROO, GLIDE, CHIMERA = "kangaroo", "glide", "chimera"
FALCON, BLOCK = "falcon", "block"
CARRYING = (EAGLE1, EAGLE3, MTP)
"""The families whose head keeps keys and values and hands a state to its next step."""


@dataclass(frozen=True)
class HeadConfig:
    """A head whatever layout it was published in.

    `taps` are indices of the target's residual stream: tap j enters layer j, and tap N
    leaves the last of N layers, before the final norm. Without taps the head reads the
    state after the final norm. Row t of a head reads the features of row t and token
    t + 1; its position is t.

        HeadConfig(family="eagle3", hidden_size=64, target_hidden_size=64,
                   vocab_size=288, draft_vocab_size=100, taps=(2, 4, 6), ...)
    """

    family: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Tokens of the target; drafted tokens have its ids."""

    draft_vocab_size: int
    """Rows of the LM head."""

    taps: tuple[int, ...] = ()
    num_layers: int = 1
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=dict)
    """`rope_theta`, `rope_type` and its settings; the head's own, not the target's."""

    max_positions: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    join_norms: bool = False
    """Embedding and feature have a norm each before fc joins them (MTP, HASS)."""

    hidden_first: bool = False
    """fc joins the feature before the embedding (MiMo), not after it."""

    norm_before_residual: bool = False
    """The residual of an EAGLE-3 layer starts from the normed feature."""

    norm_before_fc: bool = False
    """One norm over all taps."""

    fc_norm: bool = False
    """One norm for each tap (EAGLE 3.1)."""

    final_norm: bool = True
    """The LM head reads a normed state."""

    carries_normed: bool = False
    """The next step gets the normed state."""

    slots: int = 1
    """Tokens that one row drafts: Medusa or Hydra heads, or the masks of a block; for
    Falcon those that a block of as many rows drafts."""

    mask_token: int = 0
    """The token that stands in a block for a token which is not known."""

    blocks: int = 1
    """Residual blocks of each Medusa head, layers of each Hydra head."""

    @property
    def feature_size(self) -> int:
        """The width of a row of features, and of a carried row."""
        return self.hidden_size if self.taps else self.target_hidden_size

    @property
    def first_ids(self) -> Tensor | None:
        """The ids of LM heads that lack the last tokens, int64; None if none lacks."""
        drafted = self.draft_vocab_size
        return None if drafted == self.vocab_size else torch.arange(drafted)

    @property
    def carries(self) -> bool:
        """Whether the head has keys and values of its own, and carries a state."""
        return self.family in CARRYING
