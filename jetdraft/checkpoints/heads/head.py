"""A head that carries: EAGLE-1, EAGLE-3 and MTP in one module, with all numerics.

Row t reads the features of row t and token t + 1, and predicts token t + 2. The state
that it carries stands for the features of row t + 1 in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from jetdraft.checkpoints.attention import IMPLEMENTATION
from jetdraft.checkpoints.heads.head_config import EAGLE3, MTP, HeadConfig
from jetdraft.checkpoints.heads.head_layers import (
    Ended,
    HeadLayers,
    own_layers,
    target_layers,
)


class Head(Ended):
    """EAGLE-1 (2401.15077), EAGLE-3 (2503.01840) or MTP (2412.19437, 2.2).

    Embedding and LM head are modules of the target unless the head has its own. `ids`
    int64 [draft vocabulary] has the target's id of each row of the LM head; None means
    that the rows are the target's.

        head = Head(config, target)
        features = head.fuse(taps)                      # in the target's graph
        hidden, carried = head(tokens, features, positions)
        logits = head.lm_head(hidden)
    """

    def __init__(self, config: HeadConfig, target: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.ids: Tensor | None = None
        of_target = config.family == MTP
        self.stack: HeadLayers = (
            target_layers(target, config.num_layers)
            if of_target
            else own_layers(config)
        )
        width, norm = config.hidden_size, self.stack.norm
        joined = width * 2
        if config.family == EAGLE3:
            joined = config.target_hidden_size * len(config.taps)
        self.fc = nn.Linear(joined, width, bias=config.fc_bias)
        self.norm = norm(width) if config.final_norm else nn.Identity()
        if config.join_norms:
            self.embedding_norm, self.hidden_norm = norm(width), norm(width)
        if config.norm_before_fc:
            self.input_norm = norm(joined)
        if config.fc_norm:
            size = config.target_hidden_size
            self.fc_norm = nn.ModuleList(norm(size) for _ in config.taps)
        self.attend_with("sdpa")

    def attend_with(self, implementation: str) -> None:
        """Attend as "eager" or "sdpa", or over jetdraft's buffers ("jetdraft")."""
        self.implementation = implementation
        self.stack.attend_with(implementation)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        """Features [b, n, w] of the target's states [b, n, target hidden] at the taps.

        Without taps in the config the one state is the target's after its final norm.
        They have the type of fc's weight, which should be float32: in float16 the
        residual streams of some targets overflow.
        """
        config = self.config
        if not config.taps:
            (state,) = taps
            return state
        states = [state.to(self.fc.weight.dtype) for state in taps]
        if config.fc_norm:
            norms = zip(self.fc_norm, states, strict=True)
            states = [norm(state) for norm, state in norms]
        joined = torch.cat(states, dim=-1)
        if config.norm_before_fc:
            joined = self.input_norm(joined)
        features: Tensor = self.fc(joined)
        return features

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        positions: Tensor,
        cache: Cache | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One pass over rows: the states for the LM head, and the carried states.

        `tokens` and `positions` are int64 [b, n], `features` [b, n, w]; the outputs are
        [b, n, h]. In an attention of transformers a row sees the rows of `cache` and
        the rows before it, or what the float `mask` [1, 1, n, slots] lets it see.
        """
        embedded = self.embed_tokens(tokens)
        features = features.to(embedded.dtype)
        if mask is None and self.implementation != IMPLEMENTATION:
            mask = _causal(features, cache, self.stack.window)
        if self.config.family == EAGLE3:
            states = self.stack(features, positions, cache, mask, embedded=embedded)
        else:
            states = self.stack(self._join(embedded, features), positions, cache, mask)
        normed = self.norm(states)
        return normed, normed if self.config.carries_normed else states

    def _join(self, embedded: Tensor, features: Tensor) -> Tensor:
        """fc over embedding and feature, [b, n, 2 * h] to [b, n, h]."""
        if self.config.join_norms:
            embedded, features = (
                self.embedding_norm(embedded),
                self.hidden_norm(features),
            )
        parts = (
            [features, embedded] if self.config.hidden_first else [embedded, features]
        )
        joined: Tensor = self.fc(torch.cat(parts, dim=-1))
        return joined


def _causal(rows: Tensor, cache: Cache | None, window: int | None) -> Tensor:
    """A mask [1, 1, n, past + n] that shows each row the rows up to itself.

    With a `window` it shows the last so many of them.
    """
    count = rows.shape[1]
    past = int(cache.get_seq_length()) if cache is not None else 0
    mask = rows.new_full((count, past + count), -torch.inf)
    later = mask.triu(past + 1)
    return (later + mask.tril(past - window) if window else later)[None, None]
