"""Puts learned weights into the folder of a running model, which takes them itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetdraft.errors import OutputError, StoreError
from jetdraft.learning.weight_sets import ARRAYS, OWN, PARTIAL, Choice, WeightSets
from jetdraft.manifest import sha256_of

Arrays = Mapping[str, npt.NDArray[Any]]

TRAINED = "trained.safetensors"
"""The merged weights of a set in floats, by the checkpoint's names."""


def publish(
    sets: WeightSets, arrays: Arrays, trained: Mapping[str, Tensor], cleared: str
) -> str | None:
    """Write a set, and put it on trial; gives its name. Raises `OutputError`.

    A set that was still on trial is replaced: the trial is against the weights that
    were judged last. `cleared` is that of the choice before the lessons were read; if
    the folder was cleared since, nothing is written, and the name is None.

        publish(sets, arrays, {"model.layers.0.mlp.up_proj.weight": weight}, cleared)
    """
    name = None

    def written(now: Choice) -> Choice | None:
        nonlocal name
        if now.cleared != cleared:
            return None
        name = _write(sets.folder, arrays, trained)
        judged = judged_name(now)
        return now if name == judged else replace(now, name=name, before=judged)

    try:
        sets.change(written)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"cannot write {sets.folder} ({error}); free some space"
        ) from error
    return name


def judged_name(choice: Choice) -> str:
    """The set that has passed its trial last; "" for the bundle's own weights."""
    return choice.name if choice.before is None else choice.before


def judged_weights(sets: WeightSets) -> dict[str, Tensor]:
    """The merged weights that have passed their trial last; none for the bundle's own.

    Raises `StoreError` if they are damaged.
    """
    name = judged_name(sets.choice())
    if name == OWN:
        return {}
    file = sets.folder / name / TRAINED
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{file} is damaged ({error}); clear the folder with jetdraft store clear"
        ) from error


def _write(folder: Path, arrays: Arrays, trained: Mapping[str, Tensor]) -> str:
    """Write the folder of a set, which appears whole."""
    partial = Path(mkdtemp(prefix=PARTIAL, dir=folder))
    np.savez(partial / ARRAYS, **arrays)  # type: ignore[arg-type]
    save_file(dict(trained), partial / TRAINED)
    for file in partial.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    name = sha256_of(partial / ARRAYS)
    if not (folder / name).exists():
        partial.rename(folder / name)
    return name
