"""Medusa (2401.10774): heads that each read one state, and guess a token each."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import MEDUSA, HeadConfig
from jetdraft.checkpoints.heads.head_fields import fit_heads
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import check_keys
from jetdraft.errors import CheckpointError, printable

_KEYS = {
    "medusa_num_heads",  # published configs have it wrong: the tensors are counted
    "medusa_num_layers",
    "base_model_name_or_path",
    "version",
    # vLLM's:
    "num_heads",
    "hidden_size",
    "vocab_size",
    "truncated_vocab_size",
    "medusa_fc_bias",  # the tensors say it
    "max_paths",  # of vLLM's trees
    "topk",
    "max_seq_len",
}
_NAMES = (
    (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
    (r"medusa_heads\.blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"blocks.\1.\2.\3"),
    (r"medusa_heads\.lm_heads\.(\d+)\.weight", r"lm_heads.\1.weight"),
)
"""Patterns of the names in files of Medusa's authors and of vLLM, and the names in
`Medusa`."""


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
    named = any(name.startswith("medusa_heads.lm_heads.") for name in files.tensors)
    return named or "medusa_num_heads" in files.config


def check_medusa(files: HeadFiles) -> None:
    """Raise `CheckpointError` for a config that no target could make right."""
    check_keys(files.source, files.config, _KEYS)


def read_medusa(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load. The tensors tell how many heads there are.

    Raises `CheckpointError` for heads of another target.
    """
    source = files.source
    check_medusa(files)
    tensors = _named(files)
    blocks = {name for name in tensors if name.startswith("blocks.")}
    slots = _slots(source, tensors.keys() - blocks)
    own = len(tensors["lm_heads.0.weight"])
    drafted = fit_heads(source, tensors, target)
    rows = files.config.get("truncated_vocab_size")
    if rows not in (None, target.vocab_size, own):
        raise CheckpointError(
            f"the config of {source} has truncated_vocab_size={printable(rows, 60)}; "
            "jetdraft reads Medusa heads that choose among all tokens"
        )
    if not any(name.endswith(".bias") for name in blocks):  # vLLM's have none
        for name in blocks:
            bias = name.removesuffix("weight") + "bias"
            tensors[bias] = torch.zeros(len(tensors[name]))
    width = target.model.config.get_text_config(decoder=True).hidden_size
    config = HeadConfig(
        family=MEDUSA,
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=target.vocab_size,
        draft_vocab_size=drafted,
        slots=slots,
        blocks=len({name.split(".")[2] for name in blocks}),
    )
    return config, tensors


def _named(files: HeadFiles) -> dict[str, Tensor]:
    """The tensors by their names in `Medusa`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        new = _module_name(name.removeprefix("medusa_head."))
        if new is None or new in tensors:
            raise CheckpointError(
                f"{files.source} has {printable(name, 60)} where Medusa has heads like "
                "0.0.linear.weight and 0.1.weight; fetch it again"
            )
        tensors[new] = tensor
    return tensors


def _slots(source: str, lm_heads: set[str]) -> int:
    """The number of heads, which are numbered from 0 on."""
    numbers = sorted(name.split(".")[1] for name in lm_heads)
    if not numbers or set(numbers) != set(map(str, range(len(numbers)))):
        raise CheckpointError(
            f"{source} has the heads {printable(', '.join(numbers) or 'none', 60)}, "
            "which must be numbered from 0 on; fetch it again"
        )
    return len(numbers)


def _module_name(name: str) -> str | None:
    for pattern, new in _NAMES:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return None
