"""The files of a head: its config and its tensors, from any of the usual formats."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jetdraft.checkpoints.preview.shard_index import check_shards
from jetdraft.checkpoints.reading.checkpoint_folder import check_entries
from jetdraft.errors import CheckpointError, printable
from jetdraft.parsing import read_json_file

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt")
"""The last is Medusa's and Hydra's; other files of torch belong to a training."""


@dataclass(frozen=True)
class HeadFiles:
    """The contents of a folder that holds a head.

    `config` is its config.json, `tensors` are all tensors of its weight files by name.

        files = HeadFiles.read("AngelSlim/Qwen3-1.7B_eagle3")
    """

    source: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, source: str) -> HeadFiles:
        """Read a local folder or a hub id; raises `CheckpointError`.

        Files of torch are read without their code (`weights_only`).
        """
        folder = _folder(source)
        try:
            config = read_json_file(folder / "config.json")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{source} has no readable config.json ({error}); give the folder of a "
                "published head"
            ) from error
        if not isinstance(config, dict):
            raise CheckpointError(
                f"the config.json of {source} is no object; fetch it again"
            )
        return cls(source, config, _tensors(source, folder))

    @property
    def is_speculators(self) -> bool:
        """Whether the library speculators wrote it, whose flags have own meanings."""
        return "speculators_model_type" in self.config

    def name_of(self, name: str, renamed: Mapping[str, Tensor]) -> str:
        """The name in the files of a tensor that a head's module calls `name`.

        `renamed` are the files' tensors by their names in the module. A tensor that the
        files lack has the name that its neighbours' names suggest.
        """
        names = {id(tensor): own for own, tensor in self.tensors.items()}
        known = {new: names[id(t)] for new, t in renamed.items() if id(t) in names}
        if name in known:
            return known[name]
        stems = [_stems(new, own) for new, own in known.items()]
        fitting = [stem for stem in stems if name.startswith(stem[0])]
        new, own = max(fitting, key=lambda stem: len(stem[0]), default=("", ""))
        return own + name.removeprefix(new)


def _stems(new: str, own: str) -> tuple[str, str]:
    """What two names of a tensor have before the parts in which they agree."""
    parts = [name.split(".") for name in (new, own)]
    while parts[0] and parts[1] and parts[0][-1] == parts[1][-1]:
        parts = [names[:-1] for names in parts]
    first, second = ("".join(f"{part}." for part in names) for names in parts)
    return first, second


def _folder(source: str) -> Path:
    if os.path.isdir(source):
        check_entries(Path(source))
        check_shards(Path(source))
        return Path(source)
    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", *_PATTERNS]))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no head at {printable(source)}; give a folder, or a hub id like org/name"
        ) from error


def _tensors(source: str, folder: Path) -> dict[str, Tensor]:
    """All tensors of the first format of which there are files, sharded or not."""
    for pattern in _PATTERNS:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob(pattern)):
            tensors |= _read(file)
        if tensors:
            return tensors
    raise CheckpointError(
        f"{source} has no weights in .safetensors, pytorch_model.bin or *_lm_head.pt; "
        "fetch it again"
    )


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        contents = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{file} is damaged; fetch it again") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch it again") from error
    except UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds code beside its weights, which is never run; give a file of "
            "tensors only"
        ) from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} holds no table of tensors; fetch it again")
    return {
        str(name): value for name, value in contents.items() if torch.is_tensor(value)
    }
