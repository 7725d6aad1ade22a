"""Checks the index of a checkpoint in shards before a shard is opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from jetdraft.errors import CheckpointError, printable
from jetdraft.parsing import JsonError, read_json_file

_MOST_BYTES = 1 << 28
"""The largest published indices have some 20 MB."""


def check_shards(folder: Path) -> None:
    """Raise `CheckpointError` for a shard outside the folder, or one that is missing.

    An index of which no shard is here is that of a format that was not fetched.

        check_shards(Path("checkpoint/"))
    """
    for index in sorted(folder.glob("*.index.json")):
        shards = sorted(set(_shards(index)))
        for name in shards:
            if _leaves(name):
                raise CheckpointError(
                    f"{printable(index)} names the shard {printable(name, 60)}, which "
                    "is outside the folder; fetch the files again"
                )
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing and len(missing) < len(shards):
            raise CheckpointError(
                f"{printable(folder)} lacks the shard {printable(missing[0], 60)}, "
                f"which its {index.name} lists; fetch it again"
            )


def _shards(index: Path) -> Iterator[str]:
    """The file of each tensor, as an index of transformers has them."""
    try:
        contents = read_json_file(index, _MOST_BYTES)
    except (OSError, JsonError) as error:
        raise CheckpointError(
            f"{printable(index)} cannot be read ({error}); fetch it again"
        ) from error
    table = contents.get("weight_map") if isinstance(contents, dict) else None
    for name in table.values() if isinstance(table, dict) else ():
        if isinstance(name, str):
            yield name


def _leaves(name: str) -> bool:
    """Whether a path leads out of the folder it is relative to, on any system."""
    return any(
        bool(path.anchor) or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )
