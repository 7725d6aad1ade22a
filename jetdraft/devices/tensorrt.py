"""What TensorRT needs beside a graph: ranges of shapes, and a folder for engines."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import TensorSpec
from jetdraft.devices.providers import TensorrtOptions

WIDTHS = (2, 4, 8)
"""Widths with an engine of their own; each engine holds a copy of the weights."""

_MADE_BY = "made-by.json"


def profile(contract: StepContract, width: int | None) -> tuple[str, str, str]:
    """The smallest, usual and largest input shapes, as TensorRT's options take them.

    For passes of one `width`, in which all rows have an answer, or of any width (None).
    """
    streams = contract.streams
    if width is not None:
        sizes = [(width, width, count * width) for count in (0, streams, streams)]
    else:
        most = contract.max_width
        sizes = [(1, 1, 0), (most, 1, 0), (most, most, most * streams)]
    dynamic = [
        spec
        for spec in contract.inputs
        if any(isinstance(axis, str) for axis in spec.shape)
    ]
    least, usual, largest = (
        _shapes(dynamic, *size, contract.members, contract.prefix) for size in sizes
    )
    return least, usual, largest


def _shapes(specs: Sequence[TensorSpec], *sizes: int) -> str:
    """The shapes in TensorRT's form, for example "input_ids:1x4,answer_rows:4"."""
    sized = ((spec.name, spec.sized(*sizes)) for spec in specs)
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in sized)


def engine_options(
    contract: StepContract, width: int | None, folder: Path | None
) -> TensorrtOptions:
    """The options of one engine; without a `folder`, every load builds it again."""
    least, usual, largest = profile(contract, width)
    cache = "" if folder is None else str(folder / f"width-{width or 'any'}")
    return TensorrtOptions(
        trt_engine_cache_path=cache,
        trt_timing_cache_path=cache,
        trt_profile_min_shapes=least,
        trt_profile_opt_shapes=usual,
        trt_profile_max_shapes=largest,
        trt_fp16_enable=contract.dtype == "float16",
        trt_engine_cache_enable=folder is not None,
        trt_timing_cache_enable=folder is not None,
    )


def engine_folder(folder: Path, machine: dict[str, str]) -> Path | None:
    """The folder of this machine's engines, emptied if another machine built them.

    `machine` names what engines depend on: the bundle, the GPU, the versions. Returns
    None, with a warning, if the folder cannot be written.
    """
    stamp = folder / _MADE_BY
    try:
        if _read(stamp) != machine:
            if folder.exists():
                warnings.warn(
                    f"the TensorRT engines in {folder} belong to another bundle, GPU "
                    "or version; they are built again, which takes minutes",
                    stacklevel=4,
                )
                shutil.rmtree(folder)
            # Width classes measured on the old engines do not hold for new ones.
            for measured in folder.parent.glob("tensorrt*.json"):
                measured.unlink()
            folder.mkdir(parents=True)
            stamp.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        warnings.warn(
            f"TensorRT engines cannot be kept in {folder} ({error.strerror}); they are "
            "built at every load",
            stacklevel=4,
        )
        return None
    return folder


def _read(stamp: Path) -> object:
    try:
        return json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
