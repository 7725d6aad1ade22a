"""The attention nodes of a step graph, in both flavours."""

from __future__ import annotations

import onnx_ir as ir

_BIAS_INPUTS = {"GroupQueryAttention": 10, "Attention": 3}


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """All GroupQueryAttention nodes: they read and write the KV buffers."""
    return [node for node in graph if node.op_type == "GroupQueryAttention"]


def has_windows(graph: ir.Graph) -> bool:
    """Whether a layer attends in a sliding window.

    Windows count slots of a buffer, which are not the positions of a branching draft.
    """
    return any(
        node.attributes.get_int("local_window_size", -1) > 0
        for node in attentions(graph)
    )


def add_bias(graph: ir.Graph, bias: ir.Value) -> None:
    """Add `bias` to the scores of every attention that has no bias yet, in place."""
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is None:
            continue
        if len(node.inputs) <= place:
            node.resize_inputs(place + 1)
        if node.inputs[place] is None:
            node.replace_input_with(place, bias)
