"""The folder of a checkpoint: where it is, what may be in it, its hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.preview.shard_index import check_shards
from jetdraft.checkpoints.streamed import SETTINGS
from jetdraft.checkpoints.streamed import WEIGHTS as STREAM_WEIGHTS
from jetdraft.errors import CheckpointError, printable

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}


def check_folder(source: str) -> None:
    """Raise `CheckpointError` for a local path without a config.

    Any other source may be a hub id.
    """
    path = Path(source)
    # Unlike those of `Path`, these functions take a name of any length.
    looks_local = os.path.exists(source) or source.startswith((".", "/", "~"))
    looks_local = looks_local or path.suffix == ".gguf"
    # A hub id has one slash, and its owner is no folder here.
    looks_local = looks_local or source.count("/") != 1
    looks_local = looks_local or os.path.isdir(path.parent)
    if not looks_local:
        return
    if not os.path.isdir(source):
        raise CheckpointError(
            f"no checkpoint at {printable(source)}; give a folder, a GGUF file, or a "
            "hub id like org/name"
        )
    if not (path / "config.json").is_file():
        for file in sorted(path.glob("*.gguf")):
            raise CheckpointError(f"{source} has no config.json; give the file {file}")
        raise CheckpointError(
            f"{source} has no config.json; give a folder that save_pretrained wrote"
        )
    check_entries(path)
    check_shards(path)


def check_entries(folder: Path) -> None:
    """Raise `CheckpointError` for a pipe or a device, which might never end."""
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise CheckpointError(
                f"{printable(file)} is a pipe or a device; remove it, or fetch the "
                "files again"
            )


def checkpoint_folder(source: str) -> Path:
    """The folder of a checkpoint's files; for a hub id it is in the hub's cache.

    Raises `CheckpointError` for a GGUF file.
    """
    if is_gguf(source):
        raise CheckpointError(
            f"{source} is a GGUF file, not a folder of safetensors; give the model's "
            "Hugging Face folder"
        )
    if Path(source).is_dir():
        return Path(source)
    for name in (SETTINGS, STREAM_WEIGHTS):
        # transformers does not fetch streams; most checkpoints have none.
        transformers.utils.cached_file(
            source, name, _raise_exceptions_for_missing_entries=False
        )
    return Path(transformers.utils.cached_file(source, "config.json")).parent


def weights_sha256(folder: Path) -> str:
    """One hash over the weight files of a checkpoint."""
    digest = hashlib.sha256()
    files = [f for f in folder.glob("*.safetensors") if f.name != STREAM_WEIGHTS]
    if not files:
        raise CheckpointError(
            f"{folder} has no weights in .safetensors, by which a training names its "
            "target; save it again with save_pretrained"
        )
    for file in sorted(files):
        with file.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def stored_dtype(source: str) -> torch.dtype:
    """The type of the floats in a folder's files, which config.json may not say.

    float32 if they have several types or another type.
    """
    types = set()
    for file in Path(source).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys() if file.name != STREAM_WEIGHTS else ()
            types |= {opened.get_slice(name).get_dtype() for name in names}
    floats = {name for name in types if name.startswith(("F", "BF"))}
    return (
        _DTYPES.get(floats.pop(), torch.float32) if len(floats) == 1 else torch.float32
    )
