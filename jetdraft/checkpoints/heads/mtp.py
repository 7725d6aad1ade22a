"""Reads MTP modules: tensors in a target's own files that transformers drops.

Three layouts: DeepSeek-V3 and GLM-4.5 number the module as a layer after the last,
Qwen3-Next and Qwen3.5 have `mtp.*`, MiMo has `mtp_layers.*`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.heads.head_config import MTP, HeadConfig
from jetdraft.checkpoints.heads.head_files import HeadFiles
from jetdraft.errors import CheckpointError

_LAYOUTS = {
    # In each, the tensor of fc comes first: it tells the layout.
    "deepseek": (
        re.compile(r"^(?:.*\.)?layers\.(\d+)\.(?=(.*))"),
        {
            "eh_proj.": "fc.",
            "enorm.": "embedding_norm.",
            "hnorm.": "hidden_norm.",
            "shared_head.norm.": "norm.",
        },
    ),
    "qwen": (
        re.compile(r"^(?:.*\.)?mtp\.(?:layers\.(\d+)\.)?(?=(.*))"),
        {
            "fc.": "fc.",
            "pre_fc_norm_embedding.": "embedding_norm.",
            "pre_fc_norm_hidden.": "hidden_norm.",
            "norm.": "norm.",
        },
    ),
    "mimo": (
        re.compile(r"^(?:.*\.)?mtp_layers\.(\d+)\.(?=(.*))"),
        {
            "input_proj.": "fc.",
            "token_layernorm.": "embedding_norm.",
            "hidden_layernorm.": "hidden_norm.",
            "final_layernorm.": "norm.",
        },
    ),
}
_COPIES = ("shared_head.head.", "embed_tokens.")
"""Copies of the target's matrices."""


def is_mtp(files: HeadFiles) -> bool:
    """Whether the tensors of an MTP module are among the files'."""
    return _layout(files) is not None


def read_mtp(
    files: HeadFiles, target: Checkpoint
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The config, and the tensors to load; layers are of the target's kind.

    Raises `CheckpointError` for more than one module, which would each need a cache.
    """
    layout = _layout(files)
    assert layout is not None
    pattern, _ = _LAYOUTS[layout]
    text = target.model.config.get_text_config(decoder=True)
    modules: dict[int, dict[str, Tensor]] = {}
    shared: dict[str, Tensor] = {}
    for name, tensor in files.tensors.items():
        match = pattern.match(name)
        if match is None or (
            layout == "deepseek" and int(match[1]) < text.num_hidden_layers
        ):
            continue
        numbered = layout != "qwen" or match[1] is not None
        into = modules.setdefault(int(match[1]), {}) if numbered else shared
        into[match[2]] = tensor
    if len(modules) != 1:
        raise CheckpointError(
            f"{files.source} has {len(modules)} MTP modules; jetdraft reads files with "
            "one module"
        )
    ((_, tensors),) = modules.items()
    _check_complete(files, layout, {**shared, **tensors})
    named = _named(layout, {**shared, **tensors}, layers_only=tensors)
    return _config(files, target, text, layout), _stacked_experts(named)


def _layout(files: HeadFiles) -> str | None:
    for layout, (pattern, names) in _LAYOUTS.items():
        fc = next(iter(names))
        for name in files.tensors:
            match = pattern.match(name)
            if match and match[2] == f"{fc}weight":
                return layout
    return None


def _check_complete(files: HeadFiles, layout: str, tensors: dict[str, Tensor]) -> None:
    """Raise `CheckpointError` for a module without one of its norms."""
    fc, *norms = (f"{name}weight" for name in _LAYOUTS[layout][1])
    for name in norms:
        if name not in tensors:
            prefix = files.name_of(fc, tensors).removesuffix(fc)
            raise CheckpointError(
                f"{files.source} lacks weight {prefix + name!r}; fetch it again"
            )


def _named(
    layout: str, tensors: dict[str, Tensor], layers_only: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors under their names in `Head`."""
    names = _LAYOUTS[layout][1]
    own = {} if layout == "qwen" else names
    named = {}
    for name, tensor in tensors.items():
        if name.startswith(_COPIES):
            continue
        of_layer = name in layers_only
        table = own if of_layer else names
        prefix = next((old for old in table if name.startswith(old)), None)
        if prefix is None:
            named[f"stack.layers.0.{name}" if of_layer else name] = tensor
        else:
            named[table[prefix] + name.removeprefix(prefix)] = tensor
    return named


def _config(files: HeadFiles, target: Checkpoint, text: Any, layout: str) -> HeadConfig:
    dedicated = getattr(text, "mtp_use_dedicated_embeddings", False)
    if dedicated:
        raise CheckpointError(
            f"the MTP module of {files.source} has an embedding of its own, which "
            "jetdraft does not read; export without the head"
        )
    return HeadConfig(
        family=MTP,
        hidden_size=text.hidden_size,
        target_hidden_size=text.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        join_norms=True,
        # MiMo joins the state before the embedding.
        hidden_first=layout == "mimo"
        or bool(getattr(text, "mtp_hidden_states_first", False)),
        carries_normed=True,
    )


def _stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers 5 keeps them: one tensor for all of a kind."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    experts: dict[str, dict[tuple[str, int], Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            experts.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            others[name] = tensor
    for name, parts in experts.items():
        count = 1 + max(number for _, number in parts)
        try:
            gate, up, down = (
                torch.stack([parts[kind, index] for index in range(count)])
                for kind in ("gate", "up", "down")
            )
        except KeyError as error:
            raise CheckpointError(
                f"{name} lacks expert {error}; fetch it again"
            ) from error
        others[f"{name}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        others[f"{name}.down_proj"] = down
    return others
