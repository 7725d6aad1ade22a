"""Small edits of onnx_ir graphs, shared by fusion and quantization."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

PARAMETER = "parameter"
"""Metadata of a value: the name of the checkpoint's weight that it is."""


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """A constant of the graph; the one of that name if there already is one."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(array, name=name)
    value = ir.Value(
        name=name,
        const_value=tensor,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(tensor.dtype),
    )
    graph.register_initializer(value)
    return value


def substitute(old: Iterable[ir.Value], new: Iterable[ir.Value]) -> None:
    """Let everything that read the old values read the new ones.

    A graph output keeps its name.
    """
    for before, after in zip(old, new, strict=True):
        after.shape = before.shape
        if before.dtype is not None:
            after.dtype = before.dtype
        if before.is_graph_output():
            after.name, before.name = before.name, None
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)
