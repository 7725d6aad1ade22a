"""Residual Add and RMSNormalization become SkipSimplifiedLayerNormalization."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.export.fusing.reshapes import same_rows
from jetdraft.export.step import CUT
from jetdraft.quant.edits import initializer, producer, substitute

_CONTRIB = "com.microsoft"


def fuse_norms(graph: ir.Graph) -> None:
    """Merge Add and the RMSNormalization of its sum into one node with both results."""
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.attributes.get_int("axis") != -1:
            continue
        add = producer(norm.inputs[0], "Add")
        if _is_cut(norm.inputs[0]) or _joins_probes(norm.inputs[0]):
            # Something else reads this sum, so it cannot be computed inside the norm.
            # Use the fused norm all the same and add 0: RMSNormalization differs in its
            # last bits, and the halves of a target must give the bits of the whole.
            zero = initializer(graph, "no_skip", _zero_like(norm))
            zeros = ir.node("Mul", [norm.inputs[0], zero])
            fused = _skip_norm(norm, norm.inputs[0], zeros.outputs[0])
            graph.insert_before(norm, [zeros, fused])
            substitute([norm.outputs[0]], [fused.outputs[0]])
        elif add is not None and _same_shape(
            *(value.shape if value else None for value in add.inputs)
        ):
            fused = _skip_norm(norm, *add.inputs)
            graph.insert_before(norm, fused)
            substitute(
                [norm.outputs[0], add.outputs[0]], [fused.outputs[0], fused.outputs[3]]
            )


def _skip_norm(norm: ir.Node, *added: ir.Value | None) -> ir.Node:
    """A node that adds two values and norms the sum; its output 3 is the sum."""
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*added, norm.inputs[1]],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=_CONTRIB,
        num_outputs=4,
    )
    # Outputs 1 and 2 are statistics that only training reads.
    fused.outputs[1].name = fused.outputs[2].name = ""
    return fused


def _is_cut(value: ir.Value | None) -> bool:
    """Whether the upper half of a target starts with this value."""
    return value is not None and value.name == CUT


def _joins_probes(value: ir.Value | None) -> bool:
    """Whether a Concat makes this value from a sum of rows and the probes."""
    concat = producer(value, "Concat")
    return concat is not None and producer(concat.inputs[0], "Add") is not None


def _zero_like(norm: ir.Node) -> np.ndarray:
    """An array of one zero, of the type of the norm's weight."""
    weight = norm.inputs[1]
    dtype = weight.dtype if weight is not None else None
    return np.zeros(1, (dtype or ir.DataType.FLOAT).numpy())


def _same_shape(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether both shapes are [1, n, c] with the same n and c.

    An addition of such values does not broadcast.
    """
    if shape is None or other is None or not same_rows(shape, other):
        return False
    return bool(shape[1] == other[1])
