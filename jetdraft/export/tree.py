"""The graph for branching drafts, and a graph that moves an accepted path together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import TensorSpec
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import (
    OPSET,
    add_bias,
    add_mask,
    find_bias,
    sum_bias,
    windowed,
)
from jetdraft.quant.edits import Maker, initializer, new_value


def make_tree_graph(
    chain: ir.Model, contract: StepContract, source: str
) -> ir.Model | None:
    """Add a draft mask to the chain graph, in place, and return the graph.

    None for a model without layers, or with sliding windows. If the chain graph itself
    needs a mask, windows raise `UnsupportedModelError`.
    """
    graph = chain.graph
    if not contract.kv_shapes or windowed(graph):
        if contract.has_mask:
            raise UnsupportedModelError(
                f"{source} attends in sliding windows; streams need plain attention"
            )
        return None
    if contract.relative_positions:
        sum_bias(graph, add_mask(graph, replace(contract, tree=True)))
    else:
        add_bias(graph, _row_bias(graph, contract))
        graph.sort()  # layers below the probes read the rows' part of the bias
    return chain


def _row_bias(graph: ir.Graph, contract: StepContract) -> ir.Value:
    """Return the attention bias of a pass's rows, without probes.

    It is made of a new mask input. If the graph has a bias for rows and probes already,
    it is the rows' slice of that bias.
    """
    full_bias = find_bias(graph)
    if full_bias is None:
        return add_mask(graph, replace(contract, tree=True))
    rows = ir.node("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
    start, axis = (
        initializer(graph, f"rows_of_bias.{name}", np.array([number], np.int64))
        for name, number in (("start", 0), ("axis", 2))
    )
    cut = ir.node("Slice", [full_bias, start, rows.outputs[0], axis])
    cut.outputs[0].name = "rows_of_bias"
    producer = full_bias.producer()
    assert producer is not None
    graph.insert_after(producer, [rows, cut])
    return cut.outputs[0]


def make_compaction_graph(contract: StepContract, scattered: bool = False) -> ir.Model:
    """Make the graph that moves accepted rows together, for `Cache.compact`.

    It has no weights. In every buffer it gathers the rows `source` (int64 [m]) and
    writes them to row `target` (int64 [1]) and the rows after it. All rows of a buffer
    are gathered before the first row is written, so past and present may be the same
    memory. WebGPU has no TensorScatter: a `scattered` graph uses ScatterND, and its
    `target` is int64 [m], a slot for each row.
    """
    source = new_value(TensorSpec("source", "int64", ("m",)))
    target = new_value(TensorSpec("target", "int64", ("m" if scattered else 1,)))
    graph = ir.Graph(
        [source, target], [], nodes=[], opset_imports={"": OPSET}, name="compaction"
    )
    make = Maker(graph)
    for past, present in zip(
        contract.buffers("past"), contract.buffers("present"), strict=True
    ):
        buffer, after = new_value(past), new_value(present)
        graph.inputs.append(buffer)
        graph.outputs.append(after)
        rows = make("Gather", buffer, source, axis=2)
        if scattered:
            places = _scatter_indices(make, target, int(past.shape[1]))
            node = ir.node("ScatterND", [buffer, places, rows], outputs=[after])
        else:
            node = ir.node(
                "TensorScatter", [buffer, rows, target], {"axis": 2}, outputs=[after]
            )
        graph.append(node)
    return ir.Model(graph, ir_version=11)


def _scatter_indices(make: Maker, target: ir.Value, heads: int) -> ir.Value:
    """Return the index (0, head, slot) of each row, int64 [1, heads, m, 3].

    A sum of slots (0, 0, slot) and heads (0, head, 0), since a shape would be computed
    on the host.
    """
    by_head = np.zeros((1, heads, 1, 3), np.int64)
    by_head[0, :, 0, 1] = range(heads)
    column = make.constant("column", [1, 1, -1, 1])
    last = make.constant("last", [[[[0, 0, 1]]]])
    slots = make("Mul", make("Reshape", target, column), last)
    return make("Add", slots, make.constant(f"heads_{heads}", by_head))
