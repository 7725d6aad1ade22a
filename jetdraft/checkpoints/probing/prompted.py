"""Prompt tokens around an unchanged decoder: probes that enter at the bottom.

Parallel Prompt Decoding (Chen et al., 2405.18628): behind a token at position p stand
trained prompt tokens. Token j, from 1 on, is at position p + j. It sees what its
carrier sees, the carrier, and the prompt tokens below j; through the target's own head
it predicts the token at p + j + 1. Each prompt token can be an ensemble: member k sees
the members k of the tokens below, and the logits of the members are averaged.

    weights    gamma * members * h embeddings; the target itself stays as it is
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jetdraft.checkpoints.probing.probed import Probed
from jetdraft.checkpoints.streamed import SETTINGS, WEIGHTS, decoder_layers
from jetdraft.errors import CheckpointError, OptionError

PROMPTS = "prompts"

RANKS = 8
"""Guesses of a prompt token whose rates are kept."""


@dataclass(frozen=True)
class PromptSettings:
    """`gamma` prompt tokens behind a row, each with `members` embeddings.

    `base` is the hash of the weights that they were trained for, see `weights_sha256`.
    `ranks` are measured on held-out text: how often the best, the second, ... guess of
    each prompt token is the target's choice.

        PromptSettings(gamma=3, members=1)
    """

    gamma: int = 3
    members: int = 1
    mode: str = PROMPTS
    base: str = ""
    ranks: tuple[tuple[float, ...], ...] = ()

    def check(self) -> None:
        """Raise `OptionError` for sizes that no graph has."""
        for name, value, least, most in (
            ("prompt tokens", self.gamma, 1, 16),
            ("ensemble", self.members, 1, 64),
        ):
            if not least <= value <= most:
                raise OptionError(
                    f"{name} {value} is out of range; give {least} to {most}"
                )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return asdict(self)


class Prompts(nn.Module):
    """The embeddings of the prompt tokens: of token j's members, float [gamma * k, h].

    They start as the embeddings of `words`, int64 [gamma * k], tokens of the model.
    """

    def __init__(self, settings: PromptSettings, model: Any, words: Tensor) -> None:
        super().__init__()
        self.settings = settings
        with torch.no_grad():
            starts = model.get_input_embeddings()(words).detach()
        self.embeddings = nn.Parameter(starts.clone().float())


class Prompted(Probed):
    """A causal LM of transformers whose rows can carry prompt tokens.

    logits = Prompted(model, prompts)(ids, positions, rows, probe_ids, keep)
    """

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
        ids = probe_ids[:, None] * members + torch.arange(members)
        slots = (
            _of_members(probe_rows, members),
            ids.reshape(-1),
            _of_members(probe_ids + 1, members),
        )
        logits, _ = self.run(input_ids, position_ids, slots, keep, **options)
        if members == 1:
            return logits
        rows, probes = logits[:, : keep.shape[0]], logits[:, keep.shape[0] :]
        means = probes.unflatten(1, (-1, members)).float().mean(2).to(logits.dtype)
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
    words = torch.zeros(settings.gamma * settings.members, dtype=torch.long)
    prompted = Prompted(model, Prompts(settings, model, words))
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
