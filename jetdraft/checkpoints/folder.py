"""The folder of a checkpoint: its place, its files, its hash, and loaders' errors."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
import transformers
from safetensors import SafetensorError, safe_open

from jetdraft.checkpoints.gguf import is_gguf
from jetdraft.checkpoints.streams import SETTINGS
from jetdraft.checkpoints.streams import WEIGHTS as STREAM_WEIGHTS
from jetdraft.errors import CheckpointError, as_error, printable
from jetdraft.manifest import MANIFEST
from jetdraft.parsing import JsonError, read_json_file

_DTYPES_BY_NAME = {"F16": torch.float16, "BF16": torch.bfloat16}


def check_folder(source: str) -> None:
    """Raise `CheckpointError` for a local path without a config, not for a hub id."""
    path = Path(source)
    looks_local = (
        # Unlike the methods of `Path`, this function takes a name of any length.
        os.path.exists(source)
        or source.startswith((".", "/", "~"))
        or path.suffix == ".gguf"
        # A hub id has one slash, and its owner is no folder here.
        or source.count("/") != 1
        or os.path.isdir(path.parent)
    )
    if not looks_local:
        return
    if not os.path.isdir(source):
        raise CheckpointError(
            f"no checkpoint at {printable(source)}; give a folder, a GGUF file, or a "
            "hub id like org/name"
        )
    if (path / MANIFEST).is_file():
        fact = f"{source} is a bundle already"
        raise CheckpointError(f"{fact}; give the checkpoint that it was made of")
    if not (path / "config.json").is_file():
        files = (f"the file {file}" for file in sorted(path.glob("*.gguf")))
        fix = next(files, "a folder that save_pretrained wrote")
        raise CheckpointError(f"{source} has no config.json; give {fix}")
    check_file_types(path)
    check_shards(path)


def check_file_types(folder: Path) -> None:
    """Raise `CheckpointError` for a pipe or a device, whose reading might never end."""
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            fact = f"{printable(file)} is a pipe or a device"
            raise CheckpointError(f"{fact}; remove it, or fetch the files again")


def checkpoint_folder(source: str) -> Path:
    """Return a checkpoint's folder, fetched for a hub id; refuses a GGUF file."""
    if is_gguf(source):
        fact = f"{source} is a GGUF file, not a folder of safetensors"
        raise CheckpointError(f"{fact}; give the model's Hugging Face folder")
    if Path(source).is_dir():
        return Path(source)
    for name in (SETTINGS, STREAM_WEIGHTS):
        # transformers does not fetch streams; most checkpoints have none.
        transformers.utils.cached_file(
            source, name, _raise_exceptions_for_missing_entries=False
        )
    return Path(transformers.utils.cached_file(source, "config.json")).parent


def weights_sha256(folder: Path) -> str:
    """Return one hash over a checkpoint's weight files; raises `CheckpointError`."""
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
    """The type of the floats in a folder's files; float32 for several or others."""
    types = set()
    for file in Path(source).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names = opened.keys() if file.name != STREAM_WEIGHTS else ()
            types |= {opened.get_slice(name).get_dtype() for name in names}
    floats = {name for name in types if name.startswith(("F", "BF"))}
    only = floats.pop() if len(floats) == 1 else ""
    return _DTYPES_BY_NAME.get(only, torch.float32)


_MAX_INDEX_BYTES = 1 << 28  # Indexes of shards have at most some 20 MB.


def check_shards(folder: Path) -> None:
    """Raise `CheckpointError` for shards outside the folder, and for missing shards."""
    for index in sorted(folder.glob("*.index.json")):
        fact = f"{printable(index)} cannot be read"
        with as_error(CheckpointError, (OSError, JsonError), fact, "fetch it again"):
            contents = read_json_file(index, _MAX_INDEX_BYTES)
        table = contents.get("weight_map") if isinstance(contents, dict) else None
        names = table.values() if isinstance(table, dict) else ()
        shards = sorted({name for name in names if isinstance(name, str)})
        for name in shards:
            paths = PurePosixPath(name), PureWindowsPath(name)
            if any(bool(path.anchor) or ".." in path.parts for path in paths):
                raise CheckpointError(
                    f"{printable(index)} names the shard {printable(name, 60)}, which "
                    "is outside the folder; fetch the files again"
                )
        missing = [name for name in shards if not (folder / name).is_file()]
        # An index without any shard is of a format that was not fetched.
        if missing and len(missing) < len(shards):
            raise CheckpointError(
                f"{printable(folder)} lacks the shard {printable(missing[0], 60)}, "
                f"which its {index.name} lists; fetch it again"
            )


NO_OWN_CODE = {"trust_remote_code": False}
"""Arguments of transformers' loaders that never run a checkpoint's code.

Without them they ask on the terminal whether to run it."""


@contextmanager
def as_checkpoint_error(source: str) -> Iterator[None]:
    """Turn the errors of loaders into `CheckpointError`s of one line."""
    # pickle and transformers raise whatever they stumble on.
    damaged = f"the weights of {source} are damaged", "fetch them again"
    unread = f"cannot load {source}", "check the folder or the hub id"
    with (
        as_error(CheckpointError, Exception, *unread),
        as_error(CheckpointError, SafetensorError, *damaged),
    ):
        yield
