"""Weights that several sessions hold once, where a provider computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jetdraft.errors import ProviderError
from jetdraft.ort import ort


def shared_weights(file: Path, device: str) -> dict[str, ort.OrtValue]:
    """The weights that a graph keeps in a file beside it, on a device, by name.

    Of contrib graphs: packed integers of other types have no numpy type. Sessions that
    are given them (`SessionOptions.add_initializer`) read them in place,
    so they must live as long. The CPU provider packs weights for each session anyway.

        open_session(tree, "cuda", shared=shared_weights(chain, "cuda"))
    """
    onnx = _onnx()
    graph = onnx.load(file, load_external_data=False).graph
    found = {}
    for tensor in graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if "location" not in place:
            continue
        array = np.memmap(
            file.parent / place["location"],
            onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type),
            mode="r",
            offset=int(place["offset"]),
            shape=tuple(tensor.dims),
        )
        value = ort.OrtValue.ortvalue_from_numpy(np.array(array), device, 0)
        found[tensor.name] = value
    return found


def _onnx() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ProviderError(
            "two graphs share their weights on a GPU, and reading those needs onnx; "
            "pip install 'jetdraft[gpu]'"
        ) from error
    return onnx
