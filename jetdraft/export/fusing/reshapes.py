"""Reshapes that change nothing, and chains of them, go."""

from __future__ import annotations

import onnx_ir as ir

from jetdraft.quant.edits import producer


def drop_identity_reshapes(graph: ir.Graph) -> None:
    """Merge each chain of Reshape into one; drop it if it does not change the shape."""
    for node in list(graph):
        if node.op_type != "Reshape":
            continue
        inner = producer(node.inputs[0], "Reshape")
        if inner is not None and not _copies_sizes(node):
            node.replace_input_with(0, inner.inputs[0])
        before, after = node.inputs[0], node.outputs[0]
        if after.is_graph_output():
            continue
        if before is not None and same_rows(before.shape, after.shape):
            ir.convenience.replace_all_uses_with(after, before)


def _copies_sizes(reshape: ir.Node) -> bool:
    """Whether its target shape has a 0, which copies a size of its input."""
    shape = reshape.inputs[1].const_value if reshape.inputs[1] else None
    return shape is None or bool((shape.numpy() == 0).any())


def same_rows(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether the shapes of one value, before and after Reshape, are equal.

    Both must be [1, n, c] with the same c, so n is the same too.
    """
    if shape is None or other is None or len(shape) != 3 or len(other) != 3:
        return False
    return (
        shape[0] == other[0] == 1 and isinstance(shape[2], int) and shape[2] == other[2]
    )
