"""The `standard` flavour: a step graph of ai.onnx operators alone.

TensorRT imports neither contrib operators nor norms: attention becomes TensorScatter
and Attention-24, and norms their primitives. ScatterND, which copies the buffer, is for
an importer that does not know TensorScatter.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value
from onnx_ir.passes import common

from jetdraft.errors import UnsupportedModelError
from jetdraft.export.attentions import OPSET, attentions, has_sinks, is_shared
from jetdraft.quant.edits import Maker, replace_values


def standardize(model: ir.Model, scatter_nd: bool) -> None:
    """Rewrite a graph in place; `UnsupportedModelError` for sliding windows."""
    graph = model.graph
    for node in attentions(graph):
        _replace_attention(graph, node, scatter_nd)
    for node in [node for node in graph if node.op_type == "RMSNormalization"]:
        _replace_norm(graph, node)
    graph.opset_imports[""] = OPSET
    graph.opset_imports.pop("com.microsoft", None)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    graph.sort()


def _replace_attention(graph: ir.Graph, node: ir.Node, scatter_nd: bool) -> None:
    if node.attributes.get_int("local_window_size", -1) > 0 or has_sinks(node):
        raise UnsupportedModelError(
            "a layer attends in a sliding window or with sinks, which the standard "
            "flavour does not have; export the contrib one"
        )
    make = Maker(graph, node)
    query, key, value, past_key, past_value, last_row = node.inputs[:6]
    heads = node.attributes.get_int("num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    cursor = next(value for value in graph.inputs if value.name == "cursor")
    start = make("Cast", cursor, to=ir.DataType.INT64)
    write = _write_rows_nd if scatter_nd else _write_rows
    presents: list[Any] = [past_key, past_value]
    if not is_shared(node):
        presents = [
            write(make, past, _split_heads(make, new, kv_heads), start)
            for past, new in zip(presents, (key, value), strict=True)
        ]
    bias = node.inputs[10] if len(node.inputs) > 10 else None
    one = make.constant("one", [1])
    filled = make("Add", make("Cast", last_row, to=ir.DataType.INT64), one)
    attended = make(
        "Attention",
        *(_split_heads(make, query, heads), *presents, bias, None, None, filled),
        scale=node.attributes.get_float("scale", 0.0),
        softcap=node.attributes.get_float("softcap", 0.0),
        is_causal=1,
    )
    rows_first = make("Transpose", attended, perm=[0, 2, 1, 3])
    result = make("Reshape", rows_first, make.constant("flat", [0, 0, -1]))
    replace_values(node.outputs, [result, *presents][: len(node.outputs)])
    graph.remove(node, safe=True)


def _write_rows(make: Maker, past: Value | None, rows: Value, start: Value) -> Value:
    """Write rows [1, heads, n, d] into a buffer from the slot `start` [1] on."""
    return make("TensorScatter", past, rows, start, axis=2)


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
