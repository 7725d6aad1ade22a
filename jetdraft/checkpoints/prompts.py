"""Prompt tokens around an unchanged decoder: probes that enter at the bottom.

Parallel Prompt Decoding (Chen et al., 2405.18628): behind a token at position p stand
trained prompt tokens. Token j, from 1 on, is at position p + j. It sees what its
carrier sees, the carrier, and the prompt tokens below j; through the target's own head
it predicts the token at p + j + 1. Each prompt token can be an ensemble: member k sees
the members k of the tokens below, and the logits of the members are averaged.

    weights    gamma * members * h embeddings; the target itself stays as it is

Forecasts, as Qualcomm's self-speculative decoding ships them, are prompt tokens that
also see a learned prefix: keys and values of some rows, in every layer. No other row
sees it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.layers import decoder_layers
from jetdraft.checkpoints.probes import Probed
from jetdraft.checkpoints.streams import SETTINGS, WEIGHTS
from jetdraft.errors import CheckpointError, OptionError

PROMPTS, FORECAST = "prompts", "forecast"
MODES = (PROMPTS, FORECAST)

RANKS = 8
"""Guesses of a prompt token whose rates are kept."""


@dataclass(frozen=True)
class PromptSettings:
    """`gamma` prompt tokens behind a row, each with `members` embeddings.

    They see a learned `prefix` of that many rows in the mode "forecast". `base` is the
    hash of the weights that they were trained for, see `weights_sha256`. `ranks` are
    measured on held-out text: how often the best, the second, ... guess of each prompt
    token is the target's choice.
    """

    gamma: int = 3
    members: int = 1
    prefix: int = 0
    mode: str = PROMPTS
    base: str = ""
    ranks: tuple[tuple[float, ...], ...] = ()

    def check(self) -> None:
        """Raise `OptionError` for sizes that no graph has."""
        for name, value, least, most in (
            ("prompt tokens", self.gamma, 1, 16),
            ("ensemble", self.members, 1, 64),
            ("prefix", self.prefix, int(self.mode == FORECAST), 1024),
        ):
            if not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return asdict(self)


class Prompts(nn.Module):
    """What is trained: the embeddings of the prompt tokens, and the prefix.

    `embeddings` float [gamma * members, h] are those of token 1's members first.
    `keys` and `values` float [layers, kv_heads, prefix, head_dim] are the prefix; keys
    are as a layer's attention gets them, after their rotation.
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
        """Zeros, in the shapes that a model needs."""
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
        """The prefix of a layer: keys and values [1, kv_heads, prefix, head_dim]."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[layer][None], self.values[layer][None]


class Prompted(Probed):
    """A causal LM of transformers whose rows can carry prompt tokens."""

    def __init__(self, model: Any, prompts: Prompts) -> None:
        super().__init__(model, decoder_layers(model))
        self.prompts = prompts

    @property
    def settings(self) -> PromptSettings:
        """The settings of its prompt tokens."""
        return self.prompts.settings

    @property
    def base(self) -> str:
        """The hash of the weights that the prompt tokens were trained for."""
        return self.settings.base

    @property
    def task(self) -> dict[str, Tensor]:
        """All trained weights by their names."""
        return {
            name: weight
            for name, weight in self.named_parameters()
            if name.startswith("prompts.")
        }

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        keep: Tensor,
        **options: Any,
    ) -> Tensor:
        """Logits [b, m + r, vocab] of the rows `keep` [m] and then of the r probes.

        `input_ids` and `position_ids` are int64 [b, n]. `probe_rows` and `probe_ids`
        are [r]: the row that carries each probe, and its prompt token, from 0 on.
        """
        members = self.settings.members
        places = torch.arange(members, device=probe_ids.device)
        ids = probe_ids[:, None] * members + places
        slots = (
            _of_members(probe_rows, members),
            ids.reshape(-1),
            _of_members(probe_ids + 1, members),
        )
        logits, _ = self.run(input_ids, position_ids, slots, keep, **options)
        if members == 1:
            return logits
        rows, probes = logits[:, : keep.shape[0]], logits[:, keep.shape[0] :]
        parts = probes.reshape(probes.shape[0], -1, members, probes.shape[2])
        means = parts.float().mean(2).to(logits.dtype)
        return torch.cat([rows, means], 1)

    def starts(self, hidden: Tensor) -> Tensor:
        """The embeddings of the prompt tokens."""
        starts = self.prompts.embeddings[self.current_pass.ids].to(hidden.dtype)
        return starts[None].expand(hidden.shape[0], -1, -1)


def _of_members(numbers: Tensor, members: int) -> Tensor:
    """Each number as often as a probe has members."""
    return numbers[:, None].expand(-1, members).reshape(-1)


def load_prompts(model: Any, settings: PromptSettings, folder: Path) -> Prompted:
    """Add a checkpoint's prompt tokens to its model, in place."""
    settings.check()
    prompted = Prompted(model, Prompts.empty(settings, model))
    try:
        tensors = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for name, weight in prompted.task.items():
                if tensors[name].shape != weight.shape:
                    raise ValueError(
                        f"{name} is {list(tensors[name].shape)}, expected "
                        f"{list(weight.shape)}"
                    )
                weight.copy_(tensors[name])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit {SETTINGS} ({error}); train the prompt "
            "tokens again"
        ) from error
    return prompted.requires_grad_(False).eval()
