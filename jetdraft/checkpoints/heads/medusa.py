"""Medusa (2401.10774): heads that each read one state, and guess a token each."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import MEDUSA, HeadConfig
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import check_keys
from jetdraft.errors import CheckpointError
from jetdraft.untrusted.printable import printable

_KEYS = {
    "medusa_num_heads",  # published configs have it wrong: the tensors are counted
    "medusa_num_layers",
    "base_model_name_or_path",
    "version",
}
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


class Medusa(nn.Module):
    """Head i reads the features of row t and predicts token t + 2 + i, i from 0.

    Token t + 1 is the target's own choice.

        hidden = Medusa(config)(features)      # [b, n, w] to [b, n, slots, w]
        logits = medusa.logits(hidden)         # [b, n, slots, vocabulary]
    """

    ids: Tensor | None = None
    """The tokens of the LM heads' rows, int64 [n]; None for all tokens."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(config.blocks))
            for _ in range(config.slots)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(config.slots)
        )

    def forward(self, features: Tensor) -> Tensor:
        """The states for the LM heads: [b, n, w] to [b, n, slots, w]."""
        states = []
        for blocks in self.blocks:
            state = features
            for block in blocks:  # type: ignore[attr-defined]
                state = state + nn.functional.silu(block(state))
            states.append(state)
        return torch.stack(states, dim=2)

    def guesses(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The logits of every head, [b, n, slots, vocabulary].

        `features` are [b, n, w]; the `tokens` int64 [b, n] after them are not read.
        """
        return self.logits(self(features))

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of every head: [b, n, slots, w] to [b, n, slots, vocabulary]."""
        heads = zip(self.lm_heads, hidden.unbind(2), strict=True)
        return torch.stack([head(state) for head, state in heads], dim=2)


def is_medusa(files: HeadFiles) -> bool:
    """Whether the config or the names of the tensors are Medusa's."""
    return "medusa_num_heads" in files.config


def read_medusa(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load. The tensors tell how many heads there are.

    Raises `CheckpointError` for heads of another target.
    """
    check_keys(files.source, files.config, _KEYS)
    tensors = {
        name.removeprefix("medusa_head."): tensor
        for name, tensor in files.tensors.items()
    }
    linears = {name: match for name in tensors if (match := _LINEAR.fullmatch(name))}
    heads = {name: match for name in tensors if (match := _HEAD.fullmatch(name))}
    unknown = sorted(tensors.keys() - linears.keys() - heads.keys())
    if unknown or not heads:
        raise CheckpointError(
            f"{files.source} has {printable((*unknown, 'no tensors')[0], 60)} where "
            "Medusa has heads like 0.0.linear.weight and 0.1.weight; fetch it again"
        )
    width = target.model.config.get_text_config(decoder=True).hidden_size
    config = HeadConfig(
        family=MEDUSA,
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        slots=len(heads),
        blocks=len({match[2] for match in linears.values()}),
    )
    named: dict[str, Any] = {
        f"blocks.{match[1]}.{match[2]}.{match[3]}": tensors[name]
        for name, match in linears.items()
    }
    for name, match in heads.items():
        named[f"lm_heads.{match[1]}.weight"] = tensors[name]
    return config, named
