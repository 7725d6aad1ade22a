"""From a chain graph, the graphs that branching drafts need beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from jetdraft.contract import StepContract, TensorSpec
from jetdraft.edits import initializer
from jetdraft.export.standard import branch

_COMPACTION_OPSET = 24
"""The first that has TensorScatter."""

BIAS_INPUT = 10
"""Of GroupQueryAttention."""


def write_tree(chain: Path, tree: Path, contract: StepContract) -> bool:
    """Write the tree graph of a chain graph on disk, over the same weights file.

    False, and nothing is written, where a layer attends in a sliding window: windows
    count slots of the buffer, which are not the positions of a branching draft.
    """
    model = ir.load(chain)
    nodes = attentions(model.graph)
    if any(node.attributes.get_int("local_window_size", -1) > 0 for node in nodes):
        return False
    bias = _bias(model.graph, contract)
    branch(model.graph, bias)
    for node in nodes:
        # Where streams are, there is a bias already, for rows and probes.
        if len(node.inputs) <= BIAS_INPUT or node.inputs[BIAS_INPUT] is None:
            node.resize_inputs(max(len(node.inputs), BIAS_INPUT + 1))
            node.replace_input_with(BIAS_INPUT, bias)
    ir.save(model, tree)
    return True


def _bias(graph: ir.Graph, contract: StepContract) -> ir.Value:
    """The rows' bias: a new input, or the part of one that is there for them."""
    if not contract.streams:
        bias = value_of(contract.bias)
        graph.inputs.append(bias)
        return bias
    whole = next(value for value in graph.inputs if value.name == contract.bias.name)
    rows = ir.node("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
    start, axis = (
        initializer(graph, f"rows_of_bias.{name}", np.array([at], np.int64))
        for name, at in (("start", 0), ("axis", 2))
    )
    cut = ir.node("Slice", [whole, start, rows.outputs[0], axis])
    cut.outputs[0].name = "rows_of_bias"
    graph.insert_before(graph[0], [rows, cut])
    return cut.outputs[0]


def write_compaction(file: Path, contract: StepContract) -> None:
    """Write the graph that moves accepted rows together, as `Cache.compact` runs it.

    Weightless, over all buffers: gather the rows `source` (int64 [m]) and write them
    from row `target` (int64 [1]) on. All rows of a buffer are gathered before one is
    written, so past and present may be the same memory.
    """
    source = value_of(TensorSpec("source", "int64", ("m",)))
    target = value_of(TensorSpec("target", "int64", (1,)))
    inputs, outputs, nodes = [source, target], [], []
    for past, present in zip(
        contract.buffers("past"), contract.buffers("present"), strict=True
    ):
        buffer, moved = value_of(past), value_of(present)
        rows = ir.node("Gather", [buffer, source], {"axis": 2})
        scatter = ir.node(
            "TensorScatter",
            [buffer, rows.outputs[0], target],
            {"axis": 2},
            outputs=[moved],
        )
        inputs.append(buffer)
        outputs.append(moved)
        nodes += [rows, scatter]
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        opset_imports={"": _COMPACTION_OPSET},
        name="compaction",
    )
    ir.save(ir.Model(graph, ir_version=11), file)


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """All nodes that read and write the buffers."""
    return [node for node in graph if node.op_type == "GroupQueryAttention"]


def value_of(spec: TensorSpec) -> ir.Value:
    """A graph input or output as it is declared."""
    dtype = ir.DataType.from_numpy(np.dtype(spec.dtype))
    return ir.Value(
        name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(dtype)
    )
