"""Rows chosen by number: GatherND over one axis becomes Gather.

CUDA's GatherND takes no int32, and copies a size from the host that a captured graph
would read again later. Gather takes every type and copies nothing.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.quant.edits import producer, substitute


def plain_gathers(graph: ir.Graph) -> None:
    """Replace each GatherND whose indices have one number each, in place."""
    for node in list(graph):
        chosen = _chosen(node)
        if chosen is None:
            continue
        axis, data, replaced = 0, node.inputs[0], node
        turned = producer(data, "Transpose")
        back = _only_reader(node, "Transpose")
        if turned is not None and back is not None and len(chosen.shape or ()) == 1:
            perm, inverse = (
                [int(i) for i in each.attributes["perm"].as_ints()]
                for each in (turned, back)
            )
            if np.argsort(perm).tolist() == inverse:
                axis, data, replaced = perm[0], turned.inputs[0], back
        gather = ir.node("Gather", [data, chosen], {"axis": axis})
        graph.insert_before(replaced, gather)
        substitute(replaced.outputs, gather.outputs)


def _chosen(node: ir.Node) -> ir.Value | None:
    """The indices along the first axis, if a node is GatherND over that axis alone."""
    if node.op_type != "GatherND" or node.attributes.get_int("batch_dims", 0) != 0:
        return None
    column = producer(node.inputs[1], "Unsqueeze")
    if column is None:
        return None
    chosen, axes = column.inputs
    if chosen is None or chosen.shape is None or axes is None or not axes.const_value:
        return None
    last = axes.const_value.numpy().tolist() in ([-1], [len(chosen.shape)])
    return chosen if last else None


def _only_reader(node: ir.Node, op_type: str) -> ir.Node | None:
    """The node that alone reads the first output of `node`, if it has that type."""
    output = node.outputs[0]
    readers = [use.node for use in output.uses()]
    if output.is_graph_output() or len(readers) != 1 or readers[0].op_type != op_type:
        return None
    return readers[0]
