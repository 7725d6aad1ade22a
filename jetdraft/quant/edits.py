"""Small edits of onnx_ir graphs, shared by fusion and quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from jetdraft.contracts.tensors import TensorSpec

PARAMETER = "parameter"
"""Metadata key of a value: the checkpoint's names of its weights, one a line."""

Array = npt.NDArray[np.generic]


def value_of(spec: TensorSpec) -> ir.Value:
    """A new graph input or output with the declared name, type and shape."""
    dtype = ir.DataType.from_numpy(np.dtype(spec.dtype))
    return ir.Value(
        name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(dtype)
    )


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """A constant of the graph by name; an existing constant is not replaced."""
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


def derived(
    graph: ir.Graph,
    name: str,
    sources: Sequence[ir.Value],
    function: Callable[..., Array],
    shape: Sequence[int],
) -> ir.Value:
    """A constant that `function` computes from other constants when it is read.

    A graph of large weights takes no memory before it is written.
    """
    constants = [value.const_value for value in sources if value.const_value]
    dtype = constants[0].dtype

    def read() -> ir.TensorProtocol:
        arrays = [constant.numpy() for constant in constants]
        return ir.tensor(function(*arrays), dtype=dtype)

    fixed = ir.Shape(shape)
    value = ir.Value(
        name=name,
        const_value=ir.LazyTensor(read, dtype, fixed, name=name),
        shape=fixed,
        type=ir.TensorType(dtype),
    )
    names = [source.metadata_props.get(PARAMETER) for source in sources]
    if all(names):
        value.metadata_props[PARAMETER] = "\n".join(name for name in names if name)
    graph.register_initializer(value)
    return value


def substitute(old: Iterable[ir.Value], new: Iterable[ir.Value]) -> None:
    """Replace values wherever they are read; a graph output keeps its name."""
    for before, after in zip(old, new, strict=True):
        after.shape = before.shape
        if before.dtype is not None:
            after.dtype = before.dtype
        if before.is_graph_output():
            after.name, before.name = before.name, None
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it has that type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None
