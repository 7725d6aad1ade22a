"""Prompt tokens around an unchanged decoder: probes that enter at the bottom.

Parallel Prompt Decoding (2405.18628): prompt token j behind a row at position p is at p
+ j, sees what its carrier sees, the carrier and the prompt tokens below j, and predicts
the token at p + j + 1. It may be an ensemble of members, whose logits are averaged;
member k sees the members k below. Forecasts, as Qualcomm ships them, also see a learned
prefix: keys and values in every layer, which no other row sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.probes import ProbedModel
from jetdraft.checkpoints.streams import fill
from jetdraft.errors import OptionError

PROMPTS, FORECAST = "prompts", "forecast"
MODES = (PROMPTS, FORECAST)
"""The values of `mode` in the settings of prompt tokens."""

MAX_RANKS = 8
"""The most guesses of a prompt token whose acceptance rates are stored."""


@dataclass(frozen=True)
class PromptSettings:
    """`gamma` prompt tokens behind a row, each with `members` embeddings.

    They see a learned `prefix` of that many rows in the mode "forecast". `base` is the
    hash of their target's weights. `ranks` are measured: how often the best, the
    second, ... guess of each prompt token is the target's choice. streams.json has
    these fields.
    """

    gamma: int = 3
    members: int = 1
    prefix: int = 0
    mode: str = PROMPTS
    base: str = ""
    ranks: tuple[tuple[float, ...], ...] = ()

    def check(self) -> None:
        """Raise `OptionError` for sizes that no graph can have."""
        for name, value, least, most in (
            ("prompt tokens", self.gamma, 1, 16),
            ("ensemble", self.members, 1, 64),
            ("prefix", self.prefix, int(self.mode == FORECAST), 1024),
        ):
            if not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )


class Prompts(nn.Module):
    """What is trained: the embeddings of the prompt tokens, and the prefix.

    `embeddings` are float [gamma * members, h], token 1's members first. `keys`
    (rotated) and `values` float [layers, kv_heads, prefix, head_dim] are the prefix.
    """

    def __init__(
        self,
        settings: PromptSettings,
        embeddings: Tensor,
        keys: Tensor | None = None,
        values: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(embeddings.detach().clone().float())
        self.keys = self.values = None
        if keys is not None and values is not None:
            self.keys = nn.Parameter(keys.detach().clone().float())
            self.values = nn.Parameter(values.detach().clone().float())

    @classmethod
    def empty(cls, settings: PromptSettings, model: Any) -> Prompts:
        """Make prompts of zeros, in the shapes that settings and model require."""
        config = model.config.get_text_config(decoder=True)
        rows = settings.gamma * settings.members
        embeddings = torch.zeros(rows, model.get_input_embeddings().embedding_dim)
        if not settings.prefix:
            return cls(settings, embeddings)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = config.num_hidden_layers, kv_heads, settings.prefix, head_dim
        return cls(settings, embeddings, torch.zeros(shape), torch.zeros(shape))

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's prefix: keys, values [1, kv_heads, prefix, head_dim]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[layer][None], self.values[layer][None]


class PromptedModel(ProbedModel):
    """A causal LM of transformers whose rows can carry prompt tokens."""

    trained = "prompts"

    def __init__(self, model: Any, prompts: Prompts) -> None:
        super().__init__(model, decoder_layers(model))
        self.prompts, self.settings = prompts, prompts.settings

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        keep: Tensor,
        **options: Any,
    ) -> Tensor:
        """Return logits [b, m + r, vocab] of m rows `keep` and then of r probes.

        `input_ids` and `position_ids` are int64 [b, n], `probe_rows` [r] the carriers
        and `probe_ids` [r] their prompt tokens, from 0 on.
        """
        members = self.settings.members
        places = torch.arange(members, device=probe_ids.device)
        ids = probe_ids[:, None] * members + places

        def of_members(numbers: Tensor) -> Tensor:
            return numbers[:, None].expand(-1, members).reshape(-1)

        probes = of_members(probe_rows), ids.reshape(-1), of_members(probe_ids + 1)
        logits, _ = self.run_pass(input_ids, position_ids, probes, keep, **options)
        if members == 1:
            return logits
        rows, others = logits[:, : keep.shape[0]], logits[:, keep.shape[0] :]
        parts = others.reshape(others.shape[0], -1, members, others.shape[2])
        means = parts.float().mean(2).to(logits.dtype)
        return torch.cat([rows, means], 1)

    def start_states(self, hidden: Tensor) -> Tensor:
        """Return the embeddings of the prompt tokens, whatever the rows' states are."""
        starts = self.prompts.embeddings[self.current_pass.ids].to(hidden.dtype)
        return starts[None].expand(hidden.shape[0], -1, -1)


def load_prompts(model: Any, settings: PromptSettings, folder: Path) -> PromptedModel:
    """Add a checkpoint's prompt tokens to its model, in place."""
    settings.check()
    prompted = PromptedModel(model, Prompts.empty(settings, model))
    fill(prompted, folder, "prompt tokens")
    return prompted.requires_grad_(False).eval()
