"""Small edits of onnx_ir graphs, shared by fusion and quantization."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from jetdraft.contracts.tensors import TensorSpec

CONTRIB_DOMAIN = "com.microsoft"  # The domain of onnxruntime's own operators.
# Metadata key of a value: the checkpoint's names of its weights, one a line.
PARAMETER = "parameter"
STORED = "stored"  # Of a constant tensor: the torch tensor of the checkpoint.
TURNED = "turned"  # The same of a constant that is its transpose.
SPILL = "spill"  # Of a graph: a file that has its large arrays until it is written.
SPILLED_BYTES = 1 << 20  # Of the smallest of these arrays.
ADAPTER = "adapter/"  # How the names of nodes begin that add LoRA to a product.
Array = npt.NDArray[np.generic]


def new_value(spec: TensorSpec) -> ir.Value:
    """Make a graph input or output with the name, type and shape of a declaration."""
    return ir.val(spec.name, ir.DataType.from_numpy(np.dtype(spec.dtype)), spec.shape)


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """Return the constant `name` of a graph; add it, with `array`, if it is missing."""
    if name in graph.initializers:
        return graph.initializers[name]
    spill = graph.meta.get(SPILL)
    is_small = array.dtype != np.uint8 or array.nbytes < SPILLED_BYTES
    if spill is None or is_small:
        tensor: ir.TensorProtocol = ir.tensor(array, name=name)
    else:
        place, size, shape = spill.seek(0, os.SEEK_END), array.nbytes, array.shape
        spill.write(np.ascontiguousarray(array).data)

        def read() -> ir.TensorProtocol:
            spill.seek(place)
            return ir.tensor(np.frombuffer(spill.read(size), np.uint8).reshape(shape))

        tensor = ir.LazyTensor(read, ir.DataType.UINT8, ir.Shape(shape), name=name)
    value = ir.val(name, const_value=tensor)
    graph.register_initializer(value)
    return value


def add_derived(
    graph: ir.Graph,
    name: str,
    sources: Sequence[ir.Value],
    function: Callable[..., Array],
    shape: Sequence[int],
) -> ir.Value:
    """Add a constant that `function` makes of `sources` when the graph is written."""
    constants = [value.const_value for value in sources if value.const_value]
    dtype = constants[0].dtype

    def read() -> ir.TensorProtocol:
        arrays = [constant.numpy() for constant in constants]
        return ir.tensor(function(*arrays), dtype=dtype)

    tensor = ir.LazyTensor(read, dtype, ir.Shape(shape), name=name)
    value = ir.val(name, const_value=tensor)
    names = [source.metadata_props.get(PARAMETER) for source in sources]
    if all(names):
        value.metadata_props[PARAMETER] = "\n".join(name for name in names if name)
    graph.register_initializer(value)
    return value


def add_turned(graph: ir.Graph, matrix: ir.Value) -> ir.Value:
    assert matrix.const_value is not None
    shape = matrix.const_value.shape.numpy()[::-1]
    turned = add_derived(graph, f"{matrix.name}.turned", [matrix], np.transpose, shape)
    assert turned.const_value is not None
    turned.const_value.meta[TURNED] = matrix.const_value.meta.get(STORED)
    return turned


class Maker:
    """Adds nodes to a graph, before a node of it or at the end."""

    def __init__(self, graph: ir.Graph, before: ir.Node | None = None) -> None:
        self.graph, self.before = graph, before

    def __call__(
        self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> ir.Value:
        """Add a node; return its only output."""
        return self.several(kind, 1, *inputs, domain=domain, **attributes)[0]

    def several(
        self,
        kind: str,
        count: int,
        *inputs: ir.Value | None,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Add a node with `count` outputs; return all of them."""
        node = ir.node(kind, list(inputs), attributes, domain=domain, num_outputs=count)
        return self.add(node)

    def add(self, node: ir.Node) -> list[ir.Value]:
        """Insert a node; return its outputs."""
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return list(node.outputs)

    def constant(self, name: str, numbers: object, kind: Any = np.int64) -> ir.Value:
        """Return the constant `name`; add it, with `numbers`, if it is missing."""
        return self.array(name, np.array(numbers, kind))

    def array(self, name: str, array: Array) -> ir.Value:
        return initializer(self.graph, name, array)


def replace_values(old: Iterable[ir.Value], new: Iterable[ir.Value]) -> None:
    """Let all readers of `old` values read `new`; a graph output keeps its name."""
    for before, after in zip(old, new, strict=True):
        after.shape = before.shape
        if before.dtype is not None:
            after.dtype = before.dtype
        if before.is_graph_output():
            after.name, before.name = before.name, None
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that makes `value`, if it has that type; else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None
