"""Rewrites of a traced step graph: they save nodes and never change a result.

Each is optional: where its pattern does not match, the graph stays as it was traced.

- rotary: GroupQueryAttention rotates query and key itself, with cosine and sine tables
  of `capacity` rows; this replaces Transpose, RotaryEmbedding, Transpose before it.
  With `beside` one contrib RotaryEmbedding does it for each of them, since attention
  on WebGPU counts positions from the cursor on, which is wrong for branches
- projections: MatMuls that share their input become one MatMul; query, key and value
  then enter attention packed
- norms: residual Add and RMSNormalization become SkipSimplifiedLayerNormalization
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common
from onnxscript.rewriter import pattern, rewrite

from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.attentions import attend_as_two, attentions
from jetdraft.export.step import CUT
from jetdraft.quant.edits import PARAMETER, derived, initializer, substitute

_CONTRIB = "com.microsoft"


def fuse(
    model: ir.Model,
    contract: StepContract,
    forms: Mapping[str, object] | None = None,
    beside: bool = False,
) -> None:
    """Apply every rewrite to `model`, in place.

    `forms` maps matrices, by their names in the checkpoint, to `Blocks.form`; only
    matrices with equal forms are merged. `beside` keeps the rotation out of attention.
    """
    rewrite(model, [_RotationInHalves.rule()])
    # Each layer computes the same cosine; merge them, so that all share one table.
    common.CommonSubexpressionEliminationPass()(model)
    tables = _RotaryTables(model, contract.slots)
    for node in attentions(model.graph):
        _fuse_rotary(model.graph, node, tables, beside)
    _drop_identity_reshapes(model.graph)
    _split_gemms(model.graph)
    _merge_projections(model.graph, forms or {})
    for node in attentions(model.graph):
        _pack_projections(node)
    _fuse_norms(model.graph)
    if contract.spare_slots and not contract.block:
        attend_as_two(model.graph)
    common.RemoveUnusedNodesPass()(model)
    model.graph.sort()


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes `value`, if it has that type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


# --- rotary ---------------------------------------------------------------------------


class _RotationInHalves(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """x cos + rotate_half(x) sin becomes RotaryEmbedding, in half precision too.

    The exporter's own rule ends at the Casts of cosine and sine to the dtype of x.
    """

    def __init__(self) -> None:
        # Cosine and sine are shared by all layers, so they stay.
        super().__init__(remove_nodes=False)

    def pattern(
        self, op: Any, x: Any, angles: Any, ends: Any, starts: Any, dtype: Any
    ) -> Any:
        both = op.Concat(angles, angles, axis=-1)
        cosine = op.Unsqueeze(op.Cast(op.Cos(both), to=dtype), [1])
        sine = op.Unsqueeze(op.Cast(op.Sin(both), to=dtype), [1])
        first = op.Slice(x, [0], ends, [3], [1])
        second = op.Slice(x, starts, _allow_other_inputs=True)
        rotated = op.Concat(op.Neg(second), first, axis=-1)
        return x * cosine + rotated * sine

    def check(
        self, _: Any, x: ir.Value, ends: ir.Value, starts: ir.Value, **__: Any
    ) -> Any:
        result = pattern.MatchResult()
        size = x.shape[3] if x.shape is not None and len(x.shape) == 4 else None
        halves = [
            v.const_value and v.const_value.numpy().tolist() for v in (ends, starts)
        ]
        if not isinstance(size, int) or halves != [[size // 2]] * 2:
            result.fail("x is not split in its middle")
        return result

    def rewrite(
        self, op: Any, x: ir.Value, angles: ir.Value, dtype: Any, **_: Any
    ) -> Any:
        cosine, sine = (op.Cast(f(angles), to=dtype) for f in (op.Cos, op.Sin))
        heads = x.shape[1] if x.shape else 0
        return op.RotaryEmbedding(x, cosine, sine, interleaved=0, num_heads=heads)


class _RotaryTables:
    """Tables of cosines and sines by position, computed by the traced graph itself.

    What an architecture computes from the positions to their cosine (for example
    scaling) is run once for the positions 0..capacity-1. The positions are the input
    `position_ids`, or a Concat of it and the positions of the probes.
    """

    def __init__(self, model: ir.Model, capacity: int) -> None:
        self.graph = model.graph
        ids = model.graph.inputs[1]
        with_probes = [n.outputs[0] for n in ids.consumers() if n.op_type == "Concat"]
        self.positions = [ids, *with_probes]
        self.capacity = capacity
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value] | None] = {}

    def of(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """The table of `value`, a constant [capacity, d/2], and the positions that
        `value` is computed from; None if it is computed from other inputs too.
        """
        if value not in self.tables:
            self.tables[value] = None
            for positions in self.positions:
                try:
                    part = ir.convenience.extract(self.graph, [positions], [value])
                except ValueError:
                    continue
                table = self._evaluate(part, positions, f"{value.name}.table")
                self.tables[value] = table, positions
                break
        return self.tables[value]

    def _evaluate(self, part: ir.Graph, source: ir.Value, name: str) -> ir.Value:
        """Run `part` of the graph for all positions; its result is a constant."""
        proto = ir.serde.serialize_model(ir.Model(part, ir_version=10))
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        positions = np.arange(self.capacity)[None]
        [table] = session.run(None, {source.name: positions})
        return initializer(self.graph, name, np.ascontiguousarray(table[0]))


def _fuse_rotary(
    graph: ir.Graph, attention: ir.Node, tables: _RotaryTables, beside: bool
) -> None:
    """Let attention rotate query and key itself, if both match the pattern."""
    query, key = (_rotation_before(attention.inputs[i]) for i in (0, 1))
    if query is None or key is None:
        return
    _, rotation, unrotated = query
    head_dim = unrotated.shape[3] if unrotated.shape else None
    # The CPU kernel rotates heads whose size is a multiple of 16 only.
    if not isinstance(head_dim, int) or head_dim % 16:
        return
    interleaved = rotation.attributes.get_int("interleaved", 0)
    if interleaved != key[1].attributes.get_int("interleaved", 0):
        return
    if list(rotation.inputs[1:3]) != list(key[1].inputs[1:3]):
        return
    cosines, sines = (tables.of(value) for value in rotation.inputs[1:3] if value)
    if cosines is None or sines is None:
        return
    if cosines[1] is not sines[1]:
        return
    for flatten, _, source in (query, key):
        flatten.replace_input_with(0, source)
    rotate = _rotate_beside if beside else _rotate_inside
    rotate(graph, attention, (cosines[0], sines[0], cosines[1]), interleaved)


Tables = tuple[ir.Value, ir.Value, ir.Value]
"""Cosines and sines [capacity, d / 2], and the positions that choose their rows."""


def _rotate_inside(
    graph: ir.Graph, attention: ir.Node, tables: Tables, interleaved: int
) -> None:
    """Let attention rotate query and key."""
    for name, number in (("do_rotary", 1), ("rotary_interleaved", interleaved)):
        attention.attributes[name] = ir.AttrInt64(name, number)
    attention.resize_inputs(max(10, len(attention.inputs)))
    for index, value in zip((7, 8, 9), tables, strict=True):
        attention.replace_input_with(index, value)


def _rotate_beside(
    graph: ir.Graph, attention: ir.Node, tables: Tables, interleaved: int
) -> None:
    """Rotate query and key with a node for each."""
    cosines, sines, positions = tables
    for place in (0, 1):
        rows = attention.inputs[place]
        node = ir.node(
            "RotaryEmbedding",
            [rows, positions, cosines, sines],
            {"interleaved": interleaved},
            domain=_CONTRIB,
        )
        if rows is not None:
            node.outputs[0].type, node.outputs[0].shape = rows.type, rows.shape
        graph.insert_before(attention, node)
        attention.replace_input_with(place, node.outputs[0])


def _rotation_before(
    value: ir.Value | None,
) -> tuple[ir.Node, ir.Node, ir.Value] | None:
    """(flattening Reshape, RotaryEmbedding, its unrotated input [1, n, heads, d])."""
    flatten = _producer(value, "Reshape")
    outer = flatten and _swap_of_rows_and_heads(flatten.inputs[0])
    rotation = outer and _producer(outer.inputs[0], "RotaryEmbedding")
    inner = rotation and _swap_of_rows_and_heads(rotation.inputs[0])
    if flatten is None or rotation is None or inner is None or len(rotation.inputs) > 3:
        return None
    source = inner.inputs[0]
    partial = rotation.attributes.get_int("rotary_embedding_dim", 0)
    if source is None or partial:
        return None
    return flatten, rotation, source


def _swap_of_rows_and_heads(value: ir.Value | None) -> ir.Node | None:
    """The Transpose that makes `value` by swapping the axes of rows and heads."""
    node = _producer(value, "Transpose")
    swaps = node is not None and node.attributes.get_ints("perm") == (0, 2, 1, 3)
    return node if swaps else None


def _drop_identity_reshapes(graph: ir.Graph) -> None:
    """Merge each chain of Reshape into one; drop it if it does not change the shape."""
    for node in list(graph):
        if node.op_type != "Reshape":
            continue
        inner = _producer(node.inputs[0], "Reshape")
        if inner is not None and not _copies_sizes(node):
            node.replace_input_with(0, inner.inputs[0])
        before, after = node.inputs[0], node.outputs[0]
        if after.is_graph_output():
            continue
        if before is not None and _same_rows(before.shape, after.shape):
            ir.convenience.replace_all_uses_with(after, before)


def _copies_sizes(reshape: ir.Node) -> bool:
    """Whether its target shape has a 0, which copies a size of its input."""
    shape = reshape.inputs[1].const_value if reshape.inputs[1] else None
    return shape is None or bool((shape.numpy() == 0).any())


def _same_rows(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether the shapes of one value, before and after Reshape, are equal.

    Both must be [1, n, c] with the same c, so n is the same too.
    """
    if shape is None or other is None or len(shape) != 3 or len(other) != 3:
        return False
    return (
        shape[0] == other[0] == 1 and isinstance(shape[2], int) and shape[2] == other[2]
    )


def _same_shape(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether both shapes are [1, n, c] with the same n and c.

    An addition of such values does not broadcast.
    """
    if shape is None or other is None or not _same_rows(shape, other):
        return False
    return bool(shape[1] == other[1])


# --- projections ----------------------------------------------------------------------


def _split_gemms(graph: ir.Graph) -> None:
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


def _merge_projections(graph: ir.Graph, forms: Mapping[str, object]) -> None:
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


def _pack_projections(attention: ir.Node) -> None:
    """Let attention read query, key and value packed, if one Split makes all three."""
    splits = [_producer(value, "Split") for value in attention.inputs[:3]]
    split = splits[0]
    if split is None or any(other is not split for other in splits):
        return
    if list(split.outputs) != list(attention.inputs[:3]):
        return
    attention.replace_input_with(0, split.inputs[0])
    attention.replace_input_with(1, None)
    attention.replace_input_with(2, None)


# --- norms ----------------------------------------------------------------------------


def _fuse_norms(graph: ir.Graph) -> None:
    """Merge Add and the RMSNormalization of its sum into one node with both results."""
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.attributes.get_int("axis") != -1:
            continue
        add = _producer(norm.inputs[0], "Add")
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
    concat = _producer(value, "Concat")
    return concat is not None and _producer(concat.inputs[0], "Add") is not None


def _zero_like(norm: ir.Node) -> np.ndarray:
    """An array of one zero, of the type of the norm's weight."""
    weight = norm.inputs[1]
    dtype = weight.dtype if weight is not None else None
    return np.zeros(1, (dtype or ir.DataType.FLOAT).numpy())
