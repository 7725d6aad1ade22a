"""The graph that moves the rows of an accepted path together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_spec import TensorSpec
from jetdraft.quant.edits import initializer, value_of

_OPSET = 24
"""The first opset that has TensorScatter."""


def write_compaction(
    file: Path, contract: StepContract, scattered: bool = False
) -> None:
    """Write the graph that moves accepted rows together, as `Cache.compact` runs it.

    It has no weights. In every buffer it gathers the rows `source` (int64 [m]) and
    writes them to row `target` (int64 [1]) and the rows after it. All rows of a buffer
    are gathered before the first row is written, so past and present may be the same
    memory. WebGPU has no TensorScatter: a `scattered` graph uses ScatterND, and its
    `target` is int64 [m], a place for each row.
    """
    source = value_of(TensorSpec("source", "int64", ("m",)))
    target = value_of(TensorSpec("target", "int64", ("m" if scattered else 1,)))
    graph = ir.Graph(
        [source, target], [], nodes=[], opset_imports={"": _OPSET}, name="compaction"
    )
    for past, present in zip(
        contract.buffers("past"), contract.buffers("present"), strict=True
    ):
        buffer, present_buffer = value_of(past), value_of(present)
        graph.inputs.append(buffer)
        graph.outputs.append(present_buffer)
        rows = _add(graph, "Gather", buffer, source, axis=2)
        if scattered:
            places = _places(graph, target, int(past.shape[1]))
            node = ir.node(
                "ScatterND", [buffer, places, rows], outputs=[present_buffer]
            )
        else:
            node = ir.node(
                "TensorScatter",
                [buffer, rows, target],
                {"axis": 2},
                outputs=[present_buffer],
            )
        graph.append(node)
    ir.save(ir.Model(graph, ir_version=11), file)


def _places(graph: ir.Graph, target: ir.Value, heads: int) -> ir.Value:
    """The place (0, head, slot) of each row in a buffer, int64 [1, heads, m, 3].

    A sum of slots (0, 0, slot) and heads (0, head, 0), since a shape would be computed
    on the host.
    """
    by_head = np.zeros((1, heads, 1, 3), np.int64)
    by_head[0, :, 0, 1] = range(heads)
    column = initializer(graph, "column", np.array([1, 1, -1, 1], np.int64))
    last = initializer(graph, "last", np.array([[[[0, 0, 1]]]], np.int64))
    slots = _add(graph, "Mul", _add(graph, "Reshape", target, column), last)
    return _add(graph, "Add", slots, initializer(graph, f"heads_{heads}", by_head))


def _add(graph: ir.Graph, kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
    """The output of a new node at the end of the graph."""
    node = ir.node(kind, list(inputs), attributes)
    graph.append(node)
    return node.outputs[0]
