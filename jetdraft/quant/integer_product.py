"""Products of integers, and embeddings read out of their matrices.

    amax = max |x| of each row;  q = round(127 x / amax) + 128, uint8
    x W  = MatMulIntegerToFloat(q, W) * amax,  with a scale for each column of W

Sums of integers are exact, so a product gives a row the same numbers in a pass of any
width. And a row more costs little; docs/log/quantization.md has the figures.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.quant.blocks import Blocks
from jetdraft.quant.edits import initializer

_CONTRIB = "com.microsoft"
_MIDDLE = 128


def stored(graph: ir.Graph, name: str, blocks: Blocks) -> ir.Value:
    """The integers of whole columns as an initializer int8 [rows, columns]."""
    signed = (blocks.packed[:, 0] ^ _MIDDLE).view(np.int8)  # 128 less
    return initializer(graph, f"{name}.w8", np.ascontiguousarray(signed.T))


def integer_product(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, blocks: Blocks
) -> list[ir.Node]:
    """The nodes that replace a float32 MatMul; `weight` is the result of `stored`."""
    read = node.inputs[0]
    unit = initializer(graph, "w8.unit", np.array(1 / 127, np.float32))
    middle = initializer(graph, "w8.middle", np.array(_MIDDLE, np.uint8))
    zero = initializer(graph, "w8.zero", np.array(0, np.int8))
    last = initializer(graph, "w8.last", np.array([-1], np.int64))
    scales = initializer(graph, f"{weight.name}.scales", blocks.scales[:, 0])
    sizes = ir.node("Abs", [read])
    largest = ir.node("ReduceMax", [sizes.outputs[0], last], {"keepdims": 1})
    # A row of zeros becomes NaN, then any integers. The last Mul makes it 0 again.
    shares = ir.node("Div", [read, largest.outputs[0]])
    rounded = ir.node("QuantizeLinear", [shares.outputs[0], unit, middle])
    product = ir.node(
        "MatMulIntegerToFloat",
        [rounded.outputs[0], weight, unit, scales, middle, zero],
        domain=_CONTRIB,
    )
    result = ir.node("Mul", [product.outputs[0], largest.outputs[0]])
    return [sizes, largest, shares, rounded, product, result]


def column_lookup(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, blocks: Blocks
) -> list[ir.Node]:
    """The nodes that replace a Gather: a token's embedding is a column of the head.

    The ids have the shape [1, n].
    """
    ids = node.inputs[1]
    scales = initializer(graph, f"{weight.name}.row_scales", blocks.scales)
    columns = ir.node("Gather", [weight, ids], {"axis": 1})
    rows = ir.node("Transpose", [columns.outputs[0]], {"perm": [1, 2, 0]})
    floats = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
    steps = ir.node("Gather", [scales, ids])
    result = ir.node("Mul", [floats.outputs[0], steps.outputs[0]])
    return [columns, rows, floats, steps, result]
