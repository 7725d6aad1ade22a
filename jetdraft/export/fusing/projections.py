"""MatMuls that share their input become one MatMul."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from jetdraft.quant.edits import PARAMETER, derived, initializer, producer, substitute


def split_gemms(graph: ir.Graph) -> None:
    """Gemm with a constant matrix becomes MatMul and Add, which can be quantized."""
    for node in list(graph):
        is_product = (
            node.op_type == "Gemm"
            and _is_matrix(node.inputs[1])
            and node.attributes.get_float("alpha", 1.0) == 1.0
            and node.attributes.get_float("beta", 1.0) == 1.0
            and not node.attributes.get_int("transA", 0)
            and not node.attributes.get_int("transB", 0)
        )
        if is_product:
            product = ir.node("MatMul", node.inputs[:2])
            product.outputs[0].shape = node.outputs[0].shape
            product.outputs[0].dtype = node.outputs[0].dtype or ir.DataType.FLOAT
            nodes = [product]
            if len(node.inputs) == 3 and node.inputs[2] is not None:
                nodes.append(ir.node("Add", [product.outputs[0], node.inputs[2]]))
            graph.insert_before(node, nodes)
            substitute(node.outputs, nodes[-1].outputs)
            graph.remove(node, safe=True)


def merge_projections(graph: ir.Graph, forms: Mapping[str, object]) -> None:
    """MatMuls of one input with constant matrices become one MatMul and a Split."""
    groups: dict[tuple[ir.Value, object], list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "MatMul" and _is_matrix(node.inputs[1]):
            source, matrix = node.inputs[:2]
            assert source is not None
            assert matrix is not None
            form = forms.get(matrix.metadata_props.get(PARAMETER, ""))
            groups.setdefault((source, form), []).append(node)
    for (source, _), nodes in groups.items():
        biases = [_bias_after(node) for node in nodes]
        if len(nodes) > 1 and len({bias is None for bias in biases}) == 1:
            _merge(graph, source, nodes, [bias for bias in biases if bias])


def _is_matrix(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.const_value is not None
        and (value.shape is not None and len(value.shape) == 2)
    )


def _bias_after(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The Add of a constant vector, if nothing else reads the MatMul's output."""
    consumers = list(node.outputs[0].consumers())
    if len(consumers) != 1 or consumers[0].op_type != "Add":
        return None
    width = node.inputs[1].shape[1] if node.inputs[1] and node.inputs[1].shape else 0
    for value in consumers[0].inputs:
        constant = value.const_value if value is not None else None
        if value is not None and constant is not None and constant.shape == (width,):
            return consumers[0], value
    return None


def _merge(
    graph: ir.Graph,
    source: ir.Value,
    nodes: list[ir.Node],
    biases: list[tuple[ir.Node, ir.Value]],
) -> None:
    """Replace MatMuls of `source`, and the Adds of their biases if they have any."""
    weights = [node.inputs[1] for node in nodes]
    sizes = [weight.shape[1] for weight in weights if weight and weight.shape]
    name = f"{nodes[0].outputs[0].name}.merged"
    matrix = _joined(graph, [w for w in weights if w], f"{name}.weight", axis=1)
    product = ir.node("MatMul", [source, matrix])
    new_nodes = [product]
    if biases:
        vector = _joined(graph, [value for _, value in biases], f"{name}.bias", axis=0)
        new_nodes.append(ir.node("Add", [product.outputs[0], vector]))
    result = new_nodes[-1].outputs[0]
    lengths = initializer(graph, f"{name}.sizes", np.array(sizes, np.int64))
    split = ir.node("Split", [result, lengths], {"axis": -1}, num_outputs=len(nodes))
    new_nodes.append(split)
    old_results = [add.outputs[0] for add, _ in biases]
    old_results = old_results or [node.outputs[0] for node in nodes]
    graph.insert_before(nodes[0], new_nodes)
    substitute(old_results, split.outputs)


def _joined(graph: ir.Graph, values: list[ir.Value], name: str, axis: int) -> ir.Value:
    """One constant that joins `values` along an axis; they stay in the graph."""
    sizes = [[int(n) for n in value.shape or ()] for value in values]  # type: ignore
    shape = [*sizes[0]]
    shape[axis] = sum(size[axis] for size in sizes)

    def join(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate(arrays, axis=axis)

    return derived(graph, name, values, join, shape)


def pack_projections(attention: ir.Node) -> None:
    """Let attention read query, key and value packed, if one Split makes all three."""
    splits = [producer(value, "Split") for value in attention.inputs[:3]]
    split = splits[0]
    if split is None or any(other is not split for other in splits):
        return
    if list(split.outputs) != list(attention.inputs[:3]):
        return
    attention.replace_input_with(0, split.inputs[0])
    attention.replace_input_with(1, None)
    attention.replace_input_with(2, None)
