"""Graphs made of the traced graph: branching drafts, compaction, halves, flavours.

TensorRT imports neither contrib operators nor norms; an importer that does not know
TensorScatter gets ScatterND, which copies the buffer.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value
from onnx_ir.passes import common

from jetdraft.contracts.step_contract import PARENTS, SplitContract, StepContract
from jetdraft.contracts.tensors import TensorSpec
from jetdraft.errors import UnsupportedModelError
from jetdraft.export import attentions
from jetdraft.export.step import CUT, Step
from jetdraft.quant.edits import Maker, new_value, replace_values


def make_tree_graph(chain: ir.Model, contract: StepContract, source: str) -> bool:
    """Add a draft mask to a chain, in place; False without layers or with windows.

    Raises `UnsupportedModelError` where a graph that needs a mask has windows.
    """
    graph = chain.graph
    if not contract.kv_shapes or attentions.windowed(graph):
        if contract.has_mask:
            fact = f"{source} attends in sliding windows"
            raise UnsupportedModelError(f"{fact}; streams need plain attention")
        return False
    if contract.relative_positions:
        mask = attentions.add_mask(graph, replace(contract, tree=True))
        attentions.add_to_position_bias(graph, mask)
    else:
        attentions.add_bias(graph, _row_bias(graph, contract))
        graph.sort()  # layers below the probes read the rows' part of the bias
    return True


def _row_bias(graph: ir.Graph, contract: StepContract) -> ir.Value:
    """Return the attention bias of a pass's rows without probes, from a new mask."""
    full_bias: Any = attentions.find_bias(graph)
    if full_bias is None:
        return attentions.add_mask(graph, replace(contract, tree=True))
    rows = ir.node("Shape", [graph.inputs[0]], {"start": 1, "end": 2})
    make = Maker(graph)
    start = make.constant("rows_of_bias.start", [0])
    axis = make.constant("rows_of_bias.axis", [2])
    cut = ir.node("Slice", [full_bias, start, rows.outputs[0], axis])
    cut.outputs[0].name = "rows_of_bias"
    graph.insert_after(full_bias.producer(), [rows, cut])
    return cut.outputs[0]


def make_compaction_graph(contract: StepContract, scatter_nd: bool = False) -> ir.Model:
    """Make the graph that moves accepted rows together, for `Cache.commit`.

    Rows `source` (int64 [m]) of every buffer move to the row `target` (int64 [1]) and
    behind. WebGPU has no TensorScatter: `scatter_nd` writes by `target` int64 [m].
    """
    source = new_value(TensorSpec("source", "int64", ("m",)))
    target = new_value(TensorSpec("target", "int64", ("m" if scatter_nd else 1,)))
    opsets, inputs = {"": attentions.OPSET}, [source, target]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports=opsets, name="compaction")
    make, sides = Maker(graph), map(contract.buffers, ("past", "present"))
    for past, present in zip(*sides, strict=True):
        buffer, after = new_value(past), new_value(present)
        graph.inputs.append(buffer)
        graph.outputs.append(after)
        rows = make("Gather", buffer, source, axis=2)
        if scatter_nd:  # by indices (0, head, slot), int64 [1, heads, m, 3], as a sum
            heads = int(past.shape[1])
            by_head = np.zeros((1, heads, 1, 3), np.int64)
            by_head[0, :, 0, 1] = range(heads)
            column = make("Reshape", target, make.constant("column", [1, 1, -1, 1]))
            slots = make("Mul", column, make.constant("last", [[[[0, 0, 1]]]]))
            places = make("Add", slots, make.constant(f"heads_{heads}", by_head))
            node = ir.node("ScatterND", [buffer, places, rows], outputs=[after])
        else:
            moved = [buffer, rows, target]
            node = ir.node("TensorScatter", moved, {"axis": 2}, outputs=[after])
        graph.append(node)
    return ir.Model(graph, ir_version=11)


_ROWS_MASK = "rows_mask"


def split_graph(model: ir.Model, contract: SplitContract) -> tuple[ir.Model, ir.Model]:
    """Split a traced graph, which it changes, into two halves with a draft mask."""
    graph = model.graph
    # With probes, the layers above the cut have a bias for rows and probes already.
    lower = replace(contract.lower, streams=0)
    attentions.add_bias(graph, attentions.add_mask(graph, lower, _ROWS_MASK))
    traced = {"hidden": CUT, "draft_mask": _ROWS_MASK}
    below = _extract(model, contract.lower_inputs, contract.lower_outputs, traced)
    # The upper half does not get these inputs, so it counts its rows by positions. Its
    # rows are text, to which no part of a picture's row is added (DeepStack).
    tokens, positions = graph.inputs[:2]
    for node in [node for node in graph if node.op_type == "Where"]:
        if _derives(node.inputs[0], tokens):
            replace_values(node.outputs, [v for v in node.inputs[2:] if v])
    _count_by(graph, tokens, 1, positions)
    for parents in (value for value in graph.inputs if value.name == PARENTS.name):
        _count_by(graph, parents, 0, positions)
    if contract.whole.streams:
        del traced["draft_mask"]
    layers = len(contract.lower.kv_shapes)
    traced |= {
        spec.name: f"{kind}.{int(layer) + layers}"
        for side in ("past", "present")
        for spec in contract.upper.buffers(side)
        for kind, _, layer in [spec.name.partition(".")]
    }
    return below, _extract(model, contract.upper_inputs, contract.upper.outputs, traced)


def _derives(value: ir.Value | None, source: ir.Value) -> bool:
    """Whether the first inputs of the nodes behind a value lead back to `source`."""
    while value and value is not source:
        value = node.inputs[0] if (node := value.producer()) else None
    return value is source


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


def standardize(model: ir.Model, scatter_nd: bool) -> None:
    """Rewrite a graph in place; `UnsupportedModelError` for sliding windows."""
    graph = model.graph
    for node in attentions.attentions(graph):
        _replace_attention(graph, node, scatter_nd)
    for node in [node for node in graph if node.op_type == "RMSNormalization"]:
        _replace_norm(graph, node)
    graph.opset_imports[""] = attentions.OPSET
    graph.opset_imports.pop("com.microsoft", None)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    graph.sort()


def _replace_attention(graph: ir.Graph, node: ir.Node, scatter_nd: bool) -> None:
    window = node.attributes.get_int("local_window_size", -1)
    if window > 0 or attentions.has_sinks(node):
        fact = "a layer attends in a sliding window or with sinks, which the standard "
        fact += "flavour does not have"
        raise UnsupportedModelError(f"{fact}; export the contrib one")
    make = Maker(graph, node)
    query, key, value, past_key, past_value, last_row = node.inputs[:6]
    heads = node.attributes.get_int("num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    cursor = next(value for value in graph.inputs if value.name == "cursor")
    start = make("Cast", cursor, to=ir.DataType.INT64)
    presents: list[Any] = [past_key, past_value]
    for place, new in enumerate(() if attentions.is_shared(node) else (key, value)):
        written = presents[place], _split_heads(make, new, kv_heads), start
        if scatter_nd:
            presents[place] = _write_rows_nd(make, *written)
        else:
            presents[place] = make("TensorScatter", *written, axis=2)
    bias = node.inputs[10] if len(node.inputs) > 10 else None
    one = make.constant("one", [1])
    filled = make("Add", make("Cast", last_row, to=ir.DataType.INT64), one)
    read = _split_heads(make, query, heads), *presents, bias, None, None, filled
    numbers: Any = {n: node.attributes.get_float(n, 0.0) for n in ("scale", "softcap")}
    attended = make("Attention", *read, **numbers, is_causal=1)
    rows_first = make("Transpose", attended, perm=[0, 2, 1, 3])
    result = make("Reshape", rows_first, make.constant("flat", [0, 0, -1]))
    replace_values(node.outputs, [result, *presents][: len(node.outputs)])
    graph.remove(node, safe=True)


def _write_rows_nd(make: Maker, past: Value | None, rows: Value, start: Value) -> Value:
    """Write rows [1, heads, n, d] with indices (0, head, slot), [1, heads, n, 3]."""
    shape = make("Shape", rows, start=0, end=3)
    heads = make("Expand", _count_along(make, rows, 1, None), shape)
    slots = make("Expand", _count_along(make, rows, 2, start), shape)
    batch = make("Sub", heads, heads)
    last = make.constant("axis_3", [3])
    columns = [make("Unsqueeze", place, last) for place in (batch, heads, slots)]
    return make("ScatterND", past, make("Concat", *columns, axis=3), rows)


def _count_along(make: Maker, rows: Value, axis: int, start: Value | None) -> Value:
    """Number an axis of [1, heads, n] from `start` or 0 on; the result broadcasts."""
    zero, one = (make.constant(f"number_{n}", n) for n in (0, 1))
    count = make("Squeeze", make("Shape", rows, start=axis, end=axis + 1))
    numbers = make("Range", zero, count, one)
    if start is not None:
        numbers = make("Add", numbers, start)
    others = [other for other in range(3) if other != axis]
    return make("Unsqueeze", numbers, make.constant(f"beside_{axis}", others))


def _split_heads(make: Maker, rows: Value | None, heads: int) -> Value:
    """Split rows [1, n, heads * d] into [1, heads, n, d]."""
    sizes = make.constant(f"by_{heads}_heads", [0, 0, heads, -1])
    return make("Transpose", make("Reshape", rows, sizes), perm=[0, 2, 1, 3])


def _replace_norm(graph: ir.Graph, node: ir.Node) -> None:
    make = Maker(graph, node)
    source, weight = node.inputs[:2]
    dtype = source.dtype if source is not None else None
    half = dtype is not None and dtype != ir.DataType.FLOAT
    x = make("Cast", source, to=ir.DataType.FLOAT) if half else source
    axis = make.constant("last_axis", [-1])
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    small = make.constant(f"epsilon_{epsilon}", [epsilon], np.float32)
    mean = make("ReduceMean", make("Mul", x, x), axis, keepdims=1)
    scaled = make("Div", x, make("Sqrt", make("Add", mean, small)))
    if half:
        scaled = make("Cast", scaled, to=dtype)
    replace_values(node.outputs[:1], [make("Mul", scaled, weight)])
    graph.remove(node, safe=True)
