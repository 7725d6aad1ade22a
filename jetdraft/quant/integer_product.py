"""Products of integers, and embeddings read out of their matrices.

    amax = max |x| of each row;  q = round(127 x / amax) + 128, uint8
    x W  = MatMulIntegerToFloat(q, W) * amax,  with a scale for each column of W

Sums of integers are exact, so a row has the same result in a pass of any width. And a
row more costs little: on AVX2 a fifth of what MatMulNBits takes for it at eight bits
(docs/log/quantization.md).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.errors import OptionError
from jetdraft.quant.blocks import Blocks
from jetdraft.quant.edits import initializer

_CONTRIB = "com.microsoft"
_MIDDLE = 128


def stored(graph: ir.Graph, name: str, blocks: Blocks) -> ir.Value:
    """The integers of whole columns as an initializer int8 [rows, columns]."""
    signed = (blocks.integers[:, 0].astype(np.int16) - _MIDDLE).astype(np.int8)
    return initializer(graph, f"{name}.w8", np.ascontiguousarray(signed.T))


def integer_product(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, blocks: Blocks
) -> list[ir.Node]:
    """The nodes that replace a MatMul; `weight` is the result of `stored`.

    Raises `OptionError` for a graph that does not compute in float32.
    """
    if blocks.scales.dtype != np.float32:
        raise OptionError(
            f"products of integers end in float32, not {blocks.scales.dtype}; leave "
            "--dtype out, or choose int8"
        )
    read = node.inputs[0]
    unit = initializer(graph, "w8.unit", np.array(1 / 127, np.float32))
    middle = initializer(graph, "w8.middle", np.array(_MIDDLE, np.uint8))
    zero = initializer(graph, "w8.zero", np.array(0, np.int8))
    last = initializer(graph, "w8.last", np.array([-1], np.int64))
    scales = initializer(graph, f"{weight.name}.scales", blocks.scales[:, 0])
    sizes = ir.node("Abs", [read])
    largest = ir.node("ReduceMax", [sizes.outputs[0], last], {"keepdims": 1})
    # A row of zeros becomes NaN and then some integers, which are multiplied by 0.
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
    """The nodes that replace a Gather: a token's embedding is a column of the head."""
    ids = node.inputs[1]
    scales = initializer(graph, f"{weight.name}.row_scales", blocks.scales)
    columns = ir.node("Gather", [weight, ids], {"axis": 1})
    rows = ir.node("Transpose", [columns.outputs[0]], {"perm": [1, 2, 0]})
    floats = ir.node("Cast", [rows.outputs[0]], {"to": ir.DataType.FLOAT})
    steps = ir.node("Gather", [scales, ids])
    result = ir.node("Mul", [floats.outputs[0], steps.outputs[0]])
    return [columns, rows, floats, steps, result]
