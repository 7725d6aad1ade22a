"""Graphs made of the chain graph: for branching drafts, compaction, and two halves."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from jetdraft.contracts.step_contract import PARENTS, SplitContract, StepContract
from jetdraft.contracts.tensors import TensorSpec
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import (
    OPSET,
    add_bias,
    add_mask,
    add_to_position_bias,
    find_bias,
    windowed,
)
from jetdraft.export.step import CUT, Step
from jetdraft.quant.edits import Maker, initializer, new_value, replace_values


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
        add_to_position_bias(graph, add_mask(graph, replace(contract, tree=True)))
    else:
        add_bias(graph, _row_bias(graph, contract))
        graph.sort()  # layers below the probes read the rows' part of the bias
    return chain


def _row_bias(graph: ir.Graph, contract: StepContract) -> ir.Value:
    """Return the attention bias of a pass's rows without probes, from a new mask."""
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


def make_compaction_graph(contract: StepContract, scatter_nd: bool = False) -> ir.Model:
    """Make the graph that moves accepted rows together, for `Cache.compact`.

    In every buffer it gathers the rows `source` (int64 [m]) before it writes them to
    the row `target` (int64 [1]) and behind, so the buffers may be updated in place.
    WebGPU has no TensorScatter: `scatter_nd` writes by `target` int64 [m], m slots.
    """
    source = new_value(TensorSpec("source", "int64", ("m",)))
    target = new_value(TensorSpec("target", "int64", ("m" if scatter_nd else 1,)))
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
        if scatter_nd:
            places = _scatter_indices(make, target, int(past.shape[1]))
            node = ir.node("ScatterND", [buffer, places, rows], outputs=[after])
        else:
            node = ir.node(
                "TensorScatter", [buffer, rows, target], {"axis": 2}, outputs=[after]
            )
        graph.append(node)
    return ir.Model(graph, ir_version=11)


def _scatter_indices(make: Maker, target: ir.Value, heads: int) -> ir.Value:
    """Return each row's index (0, head, slot), int64 [1, heads, m, 3], as a sum."""
    by_head = np.zeros((1, heads, 1, 3), np.int64)
    by_head[0, :, 0, 1] = range(heads)
    column = make.constant("column", [1, 1, -1, 1])
    last = make.constant("last", [[[[0, 0, 1]]]])
    slots = make("Mul", make("Reshape", target, column), last)
    return make("Add", slots, make.constant(f"heads_{heads}", by_head))


_ROWS_MASK = "rows_mask"


def split_graph(model: ir.Model, contract: SplitContract) -> tuple[ir.Model, ir.Model]:
    """Split a traced graph, which it changes, into two halves with a draft mask."""
    graph = model.graph
    # With probes, the layers above the cut have a bias for rows and probes already.
    add_bias(graph, add_mask(graph, replace(contract.lower, streams=0), _ROWS_MASK))
    traced = {"hidden": CUT, "draft_mask": _ROWS_MASK}
    lower = _extract(model, contract.lower_inputs, contract.lower_outputs, traced)
    # The upper half does not get these inputs, so it counts its rows by positions.
    tokens, positions = graph.inputs[:2]
    _count_by(graph, tokens, 1, positions)
    for parents in (value for value in graph.inputs if value.name == PARENTS.name):
        _count_by(graph, parents, 0, positions)
    if contract.whole.streams:
        del traced["draft_mask"]
    below = len(contract.lower.kv_shapes)
    traced |= {
        spec.name: f"{kind}.{int(layer) + below}"
        for side in ("past", "present")
        for spec in contract.upper.buffers(side)
        for kind, _, layer in [spec.name.partition(".")]
    }
    return lower, _extract(model, contract.upper_inputs, contract.upper.outputs, traced)


def drop_extra_values(model: ir.Model, step: Step) -> None:
    """Remove the step's `extra_inputs` and `extra_outputs`, which only halves use."""
    graph = model.graph
    for value in [v for v in graph.outputs if v.name in step.extra_outputs]:
        graph.outputs.remove(value)
    names = {spec.name for spec in step.extra_inputs}
    extras = [value for value in graph.inputs if value.name in names]
    for value in extras:
        _count_by(graph, value, 0, graph.inputs[1])
    common.RemoveUnusedNodesPass()(model)
    for value in extras:
        graph.inputs.remove(value)


def _count_by(graph: ir.Graph, value: ir.Value, axis: int, positions: ir.Value) -> None:
    """Let nodes read n from `positions` [1, n], not from axis `axis` of `value`."""
    for node in [n for n in value.consumers() if n.op_type == "Shape"]:
        if node.attributes.get_int("start", 0) == axis:
            size = Maker(graph, node)("Shape", positions, start=1, end=2)
            replace_values(node.outputs, [size])


def _extract(
    whole: ir.Model,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    traced: dict[str, str],
) -> ir.Model:
    """Copy a part of `whole`; `traced` maps names of the contract to names in it."""
    names = [[traced.get(s.name, s.name) for s in specs] for specs in (inputs, outputs)]
    graph = ir.convenience.extract(whole.graph, *names)
    for name in [n for n in whole.graph.initializers if n in graph.initializers]:
        # `extract` orders them by a set; a file is the same at every export.
        graph.initializers[name] = graph.initializers.pop(name)
    for values, specs in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            value.shape = ir.Shape(spec.shape)
    part = ir.Model(graph, ir_version=whole.ir_version)
    common.RemoveUnusedNodesPass()(part)
    return part
