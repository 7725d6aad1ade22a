"""Sums that CUDA cannot make in some passes."""

from __future__ import annotations

import onnx


def empty_sums(file):
    """Reductions over an axis that is empty in some passes, as (operator, input, size).

    CUDA refuses them, with keepdims too. Every pass has rows; all else may be missing.
    An axis of unknown size counts as one that may be empty.
    """
    graph = onnx.load(file, load_external_data=False).graph
    constants = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in graph.initializer
        if not each.external_data
    }
    sizes = {
        each.name: [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim]
        for each in [*graph.input, *graph.value_info]
    }
    rows, found = sizes["position_ids"][1], []
    for node in graph.node:
        if not node.op_type.startswith("Reduce"):
            continue
        shape = sizes[node.input[0]]
        axes = constants[node.input[1]] if len(node.input) > 1 else range(len(shape))
        for size in (shape[axis] for axis in axes):
            known = isinstance(size, int) and size > 0
            if not known and rows not in str(size).split(" + "):
                found.append((node.op_type, node.input[0], size))
    return found
