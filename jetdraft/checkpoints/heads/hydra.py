"""Hydra (2402.05109): Medusa's heads, which also read the tokens drafted before."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import HYDRA, HeadConfig
from jetdraft.checkpoints.heads.head_fields import fit_heads
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.checkpoints.heads.head_keys import check_keys
from jetdraft.errors import CheckpointError

_KEYS = {
    "hydra_num_heads",
    "hydra_num_layers",
    "hydra_head_arch",
    "grounded_heads",
    "hidden_state_offset",
    "base_model_name_or_path",
}
_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.weight")
_MLP = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")


class Hydra(nn.Module):
    """Head i reads the features of row t and the tokens t + 1 to t + 1 + i.

    It predicts token t + 2 + i, i from 0. The tokens' embedding is the target's.

        hidden = Hydra(config, target)(slot, features, tokens)
        logits = hydra.lm_heads[slot](hidden)
    """

    ids: Tensor | None = None
    """The tokens of the LM heads' rows, int64 [n]; None for all tokens."""

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        width = config.hidden_size
        self.mlps = nn.ModuleList(
            nn.ModuleList(
                _Block(width * (slot + 2) if layer == 0 else width, width)
                for layer in range(config.blocks)
            )
            for slot in range(config.slots)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(config.slots)
        )

    def forward(self, slot: int, features: Tensor, tokens: Tensor) -> Tensor:
        """The states of head `slot` for its LM head, [b, n, w].

        `features` are [b, n, w]; `tokens` int64 [b, n, slot + 1] are the path so far.
        """
        embedded = self.embed_tokens(tokens).flatten(2)
        state = torch.cat([features, embedded.to(features.dtype)], dim=-1)
        for block in self.mlps[slot]:  # type: ignore[attr-defined]
            state = block(state)
        return state

    def guesses(self, features: Tensor, tokens: Tensor) -> Tensor:
        """The logits of every head, [b, n, slots, vocabulary].

        `features` are [b, n, w] and `tokens` int64 [b, n] come after them. Each head
        reads the likeliest tokens of the heads before it.
        """
        path, guesses = tokens[..., None], []
        for slot, lm_head in enumerate(self.lm_heads):
            guesses.append(lm_head(self(slot, features, path)))
            best = guesses[-1].argmax(-1, keepdim=True)
            path = torch.cat([path, best if self.ids is None else self.ids[best]], -1)
        return torch.stack(guesses, dim=2)


class _Block(nn.Module):
    """A residual block, with a matrix in place of the identity where widths differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.res_connection: nn.Module = (
            nn.Identity() if inputs == outputs else nn.Linear(inputs, outputs)
        )

    def forward(self, state: Tensor) -> Tensor:
        """[b, n, inputs] to [b, n, outputs]."""
        output: Tensor = self.res_connection(state) + nn.functional.silu(
            self.linear(state)
        )
        return output


def is_hydra(files: HeadFiles) -> bool:
    """Whether the config is Hydra's."""
    return "hydra_num_heads" in files.config


def check_hydra(files: HeadFiles) -> None:
    """Raise `CheckpointError` for a kind of Hydra with more than an MLP in a head."""
    config = files.config
    check_keys(files.source, config, _KEYS)
    asked = {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    for name, value in asked.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"the config of {files.source} has {name}={config[name]!r}; jetdraft "
                f"reads heads with {name}={value!r}"
            )


def read_hydra(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config and the tensors to load; raises `CheckpointError`."""
    check_hydra(files)
    layers = [m for name in files.tensors if (m := _MLP.fullmatch(name))]
    heads = [m for name in files.tensors if (m := _HEAD.fullmatch(name))]
    if not layers or not heads:
        raise CheckpointError(
            f"{files.source} has no tensors like hydra_mlp.0.0.linear.weight and "
            "hydra_lm_head.0.weight; fetch it again"
        )
    renamed = {
        name.replace("hydra_mlp.", "mlps.").replace(
            "hydra_lm_head.", "lm_heads."
        ): value
        for name, value in files.tensors.items()
    }
    width = target.model.config.get_text_config(decoder=True).hidden_size
    head = HeadConfig(
        family=HYDRA,
        hidden_size=width,
        target_hidden_size=width,
        vocab_size=target.vocab_size,
        draft_vocab_size=fit_heads(files.source, renamed, target),
        slots=len(heads),
        blocks=len({match[2] for match in layers}),
    )
    return head, renamed
