"""Symmetric round-to-nearest weight quantization with onnxruntime's own kernels.

`MatMul` with a constant matrix becomes `MatMulNBits`, the LM head included. Where the
head is tied to the embedding, `GatherBlockQuantized` reads the head's quantized matrix,
so the two stay one tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
)

from jetdraft.editing import initializer, substitute
from jetdraft.quant.recipe import ACCURACY_LEVEL, Recipe

_CONTRIB = "com.microsoft"
Progress = Callable[[int, int], None]


def quantize(
    model: ir.Model, recipe: Recipe, progress: Progress, standard: bool = False
) -> None:
    """Quantize every constant matrix of `model` in place.

    As MatMulNBits, or with ai.onnx operators alone: where `standard`, a MatMul reads a
    DequantizeLinear of the same integers, and embeddings are stored as floats.
    `progress(done, total)` is called after each matrix.
    """
    if recipe.bits is None:
        return
    graph = model.graph
    products = [node for node in graph if _matrix(node) is not None]
    shared: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for done, node in enumerate(products, start=1):
        weight = _matrix(node)
        assert weight is not None
        source, transposed = weight
        matrix = source.const_value.numpy() if source.const_value else np.empty((0, 0))
        oriented = matrix.T if transposed else matrix
        if standard:
            _dequantize(graph, node, source, oriented, recipe)
        else:
            shared[source] = _quantize_product(graph, node, source, oriented, recipe)
        progress(done, len(products))
    for node in list(graph):
        if node.op_type == "Gather" and node.inputs[0] in shared:
            _quantize_gather(graph, node, *shared[node.inputs[0]], recipe)
    common.RemoveUnusedNodesPass()(model)


def _matrix(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """The constant matrix of a MatMul, and whether a Transpose stands before it."""
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    value = node.inputs[1]
    transpose = value.producer()
    turned = transpose is not None and transpose.op_type == "Transpose"
    if turned and transpose is not None and transpose.inputs[0] is not None:
        value = transpose.inputs[0]
    constant = value.const_value
    if constant is None or len(constant.shape) != 2:
        return None
    return value, turned


def _quantize_product(
    graph: ir.Graph,
    node: ir.Node,
    source: ir.Value,
    matrix: npt.NDArray[np.generic],
    recipe: Recipe,
) -> tuple[ir.Value, ir.Value]:
    """Replace the MatMul by MatMulNBits; return the packed matrix and its scales.

    The matrix is uint8 [columns, blocks, bytes], the scales are [columns, blocks].
    """
    rows, columns = matrix.shape
    packed, scales = _packed(matrix, recipe)
    weight = initializer(graph, f"{source.name}.int{recipe.bits}", packed)
    scale = initializer(graph, f"{source.name}.scales", scales)
    product = ir.node(
        "MatMulNBits",
        [node.inputs[0], weight, scale],
        {
            "K": rows,
            "N": columns,
            "bits": recipe.bits,
            "block_size": recipe.block_size,
            "accuracy_level": ACCURACY_LEVEL,
        },
        domain=_CONTRIB,
    )
    _replace(graph, node, product)
    return weight, scale


def _packed(
    matrix: npt.NDArray[np.generic], recipe: Recipe
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.generic]]:
    """uint8 [columns, blocks, bytes], half their range being 0, and their scales."""
    quantizer = DefaultWeightOnlyQuantizer(
        DefaultWeightOnlyQuantConfig(
            block_size=recipe.block_size, is_symmetric=True, bits=recipe.bits
        )
    )
    packed, scales, _ = quantizer.qbits_block_quant(np.ascontiguousarray(matrix))
    return packed, scales


def _dequantize(
    graph: ir.Graph,
    node: ir.Node,
    source: ir.Value,
    matrix: npt.NDArray[np.generic],
    recipe: Recipe,
) -> None:
    """Let the MatMul read DequantizeLinear of integers [rows, columns] in blocks."""
    packed, scales = _packed(matrix, recipe)
    columns, blocks = packed.shape[:2]
    if recipe.bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1)
    zero, kind = (8, ml_dtypes.int4) if recipe.bits == 4 else (128, np.int8)
    integers = packed.reshape(columns, -1).astype(np.int16) - zero
    integers, scales = integers[:, : matrix.shape[0]], scales.reshape(columns, blocks)
    parts = {f"int{recipe.bits}": integers.T.astype(kind), "scales": scales.T}
    values = [
        initializer(graph, f"{source.name}.{name}", np.ascontiguousarray(array))
        for name, array in parts.items()
    ]
    attributes = {"axis": 0, "block_size": recipe.block_size}
    made = ir.node("DequantizeLinear", values, attributes)
    graph.insert_before(node, made)
    node.replace_input_with(1, made.outputs[0])
    for other in source.consumers():
        if other.op_type == "Gather":
            # A tied embedding: floats, but the same numbers as in the other flavour.
            spread = np.repeat(scales, recipe.block_size, 1)[:, : matrix.shape[0]]
            rows = (integers * spread).astype(scales.dtype)
            other.replace_input_with(0, initializer(graph, f"{source.name}.rows", rows))


def _quantize_gather(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, scale: ir.Value, recipe: Recipe
) -> None:
    """Read embeddings out of the LM head's quantized matrix.

    Gathering along the columns of [columns, blocks, bytes] gives rows in blocks. Only
    the scales are stored twice: the two operators want different ranks.
    """
    assert scale.const_value is not None
    scales = scale.const_value.numpy()[..., None]
    blocks = scales.shape[1]
    gather = ir.node(
        "GatherBlockQuantized",
        [weight, node.inputs[1], initializer(graph, f"{scale.name}.row", scales)],
        {
            "bits": recipe.bits,
            "block_size": recipe.block_size,
            "gather_axis": 0,
            "quantize_axis": 2,
        },
        domain=_CONTRIB,
    )
    width = node.outputs[0].shape[-1] if node.outputs[0].shape else 0
    blocked = blocks * recipe.block_size
    shape = initializer(
        graph, f"{weight.name}.row", np.array([0, 0, blocked], np.int64)
    )
    made = [gather, ir.node("Reshape", [gather.outputs[0], shape])]
    if blocked != width:
        limits = [
            initializer(graph, f"{weight.name}.{name}", np.array([at], np.int64))
            for name, at in (("start", 0), ("end", width), ("axis", 2))
        ]
        made.append(ir.node("Slice", [made[-1].outputs[0], *limits]))
    graph.insert_before(node, made[:-1])
    _replace(graph, node, made[-1])


def _replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    graph.insert_before(old, new)
    substitute(old.outputs, new.outputs)
    graph.remove(old, safe=True)
