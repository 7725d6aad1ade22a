"""Optional rewrites of a step graph: rotations, projections, norms and products."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript.rewriter import pattern, rewrite

from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.attentions import attentions, is_shared, use_own_attention
from jetdraft.export.step import CUT, PACKET
from jetdraft.native import GATED, MULTIPLY
from jetdraft.ort import ort
from jetdraft.quant import edits
from jetdraft.quant.edits import CONTRIB_DOMAIN, Maker, producer, replace_values

_SWAP = [0, 2, 1, 3]
"""Swaps the axes of rows and heads."""


class RotationInHalves(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Rewrites x cos + rotate_half(x) sin, with the heads on `axis`, in float16 too.

    Its cosines and sines are of angles, or `given` rows of tables.
    """

    def __init__(self, axis: int = 1, casts: bool = True, given: bool = False) -> None:
        super().__init__(remove_nodes=False)
        self.axis, self.casts, self.given = axis, casts, given

    def pattern(
        self,
        op: Any,
        x: Any,
        angles: Any,
        sines: Any,
        ends: Any,
        starts: Any,
        dtype: Any,
    ) -> Any:
        both = op.Concat(angles, angles, axis=-1)
        turns = [op.Cos(both), op.Sin(both)]
        if self.given:
            turns = [both, op.Concat(sines, sines, axis=-1)]
        if self.casts:
            turns = [op.Cast(turn, to=dtype) for turn in turns]
        cosine, sine = (op.Unsqueeze(turn, [self.axis]) for turn in turns)
        first = op.Slice(x, [0], ends, [3], [1])
        second = op.Slice(x, starts, _allow_other_inputs=True)
        rotated = op.Concat(op.Neg(second), first, axis=-1)
        return x * cosine + rotated * sine

    def check(self, _: Any, x: ir.Value, ends: Any, starts: Any, **__: Any) -> Any:
        result = pattern.MatchResult()
        size = x.shape[3] if x.shape is not None and len(x.shape) == 4 else None
        constants = [value.const_value for value in (ends, starts)]
        halves = [constant and constant.numpy().tolist() for constant in constants]
        if not isinstance(size, int) or halves != [[size // 2]] * 2:
            result.fail("x is not split in its middle")
        return result

    def rewrite(
        self, op: Any, x: ir.Value, angles: ir.Value, dtype: Any = None, **more: Any
    ) -> Any:
        turns = [op.Cos(angles), op.Sin(angles)]
        if self.given:
            turns = [angles, more["sines"]]
        if self.casts:
            turns = [op.Cast(turn, to=dtype) for turn in turns]
        settings = {"interleaved": 0, "num_heads": x.shape[self.axis] if x.shape else 0}
        if self.axis == 1:
            return op.RotaryEmbedding(x, *turns, **settings)
        rows = op.RotaryEmbedding(op.Transpose(x, perm=_SWAP), *turns, **settings)
        return op.Transpose(rows, perm=_SWAP)


class RotaryTables:
    """Tables of cosines and sines for the positions 0..capacity-1."""

    def __init__(self, model: ir.Model, capacity: int) -> None:
        self.graph = model.graph
        ids = model.graph.inputs[1]
        with_probes = [n.outputs[0] for n in ids.consumers() if n.op_type == "Concat"]
        self.positions = [ids, *with_probes]
        self.capacity = capacity
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value] | None] = {}

    def table_of(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """Return `value` as a table [capacity, d/2], and its positions; or None."""
        rows = producer(value, "Gather")
        if rows is not None and rows.inputs[0] in self.graph.inputs:
            table, places = rows.inputs
            return (table, places) if table and places else None
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
        file = ir.to_proto(ir.Model(part, ir_version=10)).SerializeToString()
        session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        [table] = session.run(None, {source.name: np.arange(self.capacity)[None]})
        return edits.initializer(self.graph, name, np.ascontiguousarray(table[0]))


def fuse_rotation(
    graph: ir.Graph, attention: ir.Node, tables: RotaryTables, by_nodes: bool
) -> None:
    """Let attention, or `by_nodes` before it, rotate query and key, if both match."""
    query, key = (_find_rotation(attention.inputs[i]) for i in (0, 1))
    if is_shared(attention):
        key = query
    if query is None or key is None:
        return
    _, rotation, unrotated = query
    head_dim = unrotated.shape[3] if unrotated.shape else None
    # The CPU kernel rotates heads whose size is a multiple of 16 only.
    if not isinstance(head_dim, int) or head_dim % 16:
        return
    interleaved = rotation.attributes.get_int("interleaved", 0)
    is_same = interleaved == key[1].attributes.get_int("interleaved", 0)
    if not is_same or list(rotation.inputs[1:3]) != list(key[1].inputs[1:3]):
        return
    cosines, sines = (tables.table_of(value) for value in rotation.inputs[1:3] if value)
    if cosines is None or sines is None or cosines[1] is not sines[1]:
        return
    for flatten, _, source in (query, key):
        flatten.replace_input_with(0, source)
    found = cosines[0], sines[0], cosines[1]
    if by_nodes:
        _rotate_by_nodes(graph, attention, found, interleaved)
        return
    for name, number in (("do_rotary", 1), ("rotary_interleaved", interleaved)):
        attention.attributes[name] = ir.AttrInt64(name, number)
    attention.resize_inputs(max(10, len(attention.inputs)))
    for index, value in zip((7, 8, 9), found, strict=True):
        attention.replace_input_with(index, value)


def _rotate_by_nodes(
    graph: ir.Graph, attention: ir.Node, tables: tuple[ir.Value, ...], interleaved: int
) -> None:
    cosines, sines, positions = tables
    for place in (0,) if is_shared(attention) else (0, 1):
        rows = attention.inputs[place]
        how: Any = {"domain": CONTRIB_DOMAIN, "interleaved": interleaved}
        make, read = Maker(graph, attention), (rows, positions, cosines, sines)
        rotated = make("RotaryEmbedding", *read, **how)
        if rows is not None:
            rotated.type, rotated.shape = rows.type, rows.shape
        attention.replace_input_with(place, rotated)


def _find_rotation(value: ir.Value | None) -> tuple[ir.Node, ir.Node, ir.Value] | None:
    """Return the Reshape, RotaryEmbedding and its input [1, n, heads, d]; or None."""
    flatten = producer(value, "Reshape")
    outer = flatten and _find_swap(flatten.inputs[0])
    rotation = outer and producer(outer.inputs[0], "RotaryEmbedding")
    inner = rotation and _find_swap(rotation.inputs[0])
    if flatten is None or rotation is None or inner is None or len(rotation.inputs) > 3:
        return None
    source = inner.inputs[0]
    partial = rotation.attributes.get_int("rotary_embedding_dim", 0)
    if source is None or partial:
        return None
    return flatten, rotation, source


def _find_swap(value: ir.Value | None) -> ir.Node | None:
    """The Transpose that makes `value` by swapping the axes of rows and heads."""
    node = producer(value, "Transpose")
    swaps = node is not None and [*node.attributes.get_ints("perm")] == _SWAP
    return node if swaps else None


def fuse(
    model: ir.Model,
    contract: StepContract,
    forms: Mapping[str, object] | None = None,
    rotation_nodes: bool = False,
    own_attention: bool = False,
) -> None:
    """Rewrite `model` in place; matrices merge only if `forms` are equal, by name."""
    forms_of_rotation = (1, True), (2, True), (2, False), (1, False, True)
    rewrite(model, [RotationInHalves.rule(*form) for form in forms_of_rotation])
    find_norms(model.graph)
    # Each layer computes the same cosine; merge them, so that all share one table.
    common.CommonSubexpressionEliminationPass()(model)
    tables = RotaryTables(model, contract.slots)
    for node in attentions(model.graph):
        fuse_rotation(model.graph, node, tables, rotation_nodes)
    drop_identity_reshapes(model.graph)
    fill_packets(model.graph)
    split_gemms(model.graph)
    merge_projections(model.graph, forms or {})
    for node in attentions(model.graph):
        pack_projections(node)
    fuse_norms(model.graph)
    if own_attention:
        use_own_attention(model.graph)
    common.RemoveUnusedNodesPass()(model)
    model.graph.sort()


def split_gemms(graph: ir.Graph) -> None:
    """Replace Gemm of a constant matrix by MatMul and Add, to be quantized."""
    for node in list(graph):
        is_product = (
            node.op_type == "Gemm"
            and _is_matrix(node.inputs[1])
            and node.attributes.get_float("alpha", 1.0) == 1.0
            and node.attributes.get_float("beta", 1.0) == 1.0
            and not node.attributes.get_int("transA", 0)
        )
        rows, matrix = node.inputs[:2] if is_product else (None, None)
        if matrix is not None:
            if node.attributes.get_int("transB", 0):
                matrix = edits.add_turned(graph, matrix)
            make = Maker(graph, node)
            result = make("MatMul", rows, matrix)
            result.shape = node.outputs[0].shape
            result.dtype = node.outputs[0].dtype or ir.DataType.FLOAT
            if len(node.inputs) == 3 and node.inputs[2] is not None:
                result = make("Add", result, node.inputs[2])
            replace_values(node.outputs, [result])
            graph.remove(node, safe=True)


def merge_projections(graph: ir.Graph, forms: Mapping[str, object]) -> None:
    """Merge MatMuls with constant matrices and one input into a MatMul and a Split."""
    groups: dict[tuple[ir.Value, object], list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "MatMul" and _is_matrix(node.inputs[1]):
            source: Any = node.inputs[0]
            matrix: Any = node.inputs[1]
            form = forms.get(matrix.metadata_props.get(edits.PARAMETER, ""))
            groups.setdefault((source, form), []).append(node)
    for (source, _), nodes in groups.items():
        biases = [_find_bias_add(node, _width(node.inputs[1])) for node in nodes]
        if len(nodes) > 1 and len({bias is None for bias in biases}) == 1:
            _merge_products(graph, source, nodes, [bias for bias in biases if bias])


def _is_matrix(value: Any) -> bool:
    is_constant = value is not None and value.const_value is not None
    return is_constant and value.shape is not None and len(value.shape) == 2


def _width(matrix: Any) -> int:
    return int(matrix.shape[1])


def _find_bias_add(node: ir.Node, width: int) -> tuple[ir.Node, ir.Value] | None:
    """Return a product's only reader if it adds a constant vector, and the vector."""
    add = _single_reader(node, "Add")
    for value in add.inputs if add else ():
        constant = value.const_value if value is not None else None
        if add and value and constant is not None and constant.shape == (width,):
            return add, value
    return None


def fuse_products(model: ir.Model) -> None:
    """Let products of `jetdraft.native` add biases and gate the rows that they read."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == MULTIPLY]:
        if found := _find_bias_add(node, node.attributes.get_int("N", 0)):
            add, bias = found
            node.resize_inputs(4)
            node.replace_input_with(3, bias)
            replace_values(add.outputs, node.outputs)
        gating = producer(node.inputs[0], "Mul")
        if gating is None or _single_reader(gating, MULTIPLY) is None:
            continue
        for share, passed in (gating.inputs, gating.inputs[::-1]):
            gate, linear, cubic = _find_gate(share)
            split = producer(gate, "Split")
            axis = split.attributes.get_int("axis", 0) if split else 0
            if split and axis in (-1, 2) and list(split.outputs) == [gate, passed]:
                node.op_type = GATED
                node.replace_input_with(0, split.inputs[0])
                for name, factor in (("linear", linear), ("cubic", cubic)):
                    node.attributes[name] = ir.AttrFloat32(name, factor)
    common.RemoveUnusedNodesPass()(model)


def _find_gate(share: ir.Value | None) -> tuple[ir.Value | None, float, float]:
    """Return g, a and b of a value g / (1 + e^-(a g + b g^3)); no g for others."""
    gelu, product = producer(share, "Gelu"), producer(share, "Mul")
    if gelu is not None and gelu.attributes.get_string("approximate", "") == "tanh":
        linear = math.sqrt(8 / math.pi)
        return gelu.inputs[0], linear, 0.044715 * linear
    for value in product.inputs if product else ():
        sigmoid = producer(value, "Sigmoid")
        if product and sigmoid and sigmoid.inputs[0] in product.inputs:
            return sigmoid.inputs[0], 1.0, 0.0
    return None, 0.0, 0.0


def _merge_products(
    graph: ir.Graph,
    source: ir.Value,
    nodes: list[ir.Node],
    biases: list[tuple[ir.Node, ir.Value]],
) -> None:
    """Replace MatMuls of `source` and the Adds in `biases` by one MatMul and Split."""
    weights = [node.inputs[1] for node in nodes]
    sizes = [_width(weight) for weight in weights]
    name = f"{nodes[0].outputs[0].name}.merged"
    matrix = _join_constants(graph, [w for w in weights if w], f"{name}.weight", 1)
    make = Maker(graph, nodes[0])
    result = make("MatMul", source, matrix)
    if biases:
        vector = _join_constants(graph, [v for _, v in biases], f"{name}.bias", 0)
        result = make("Add", result, vector)
    lengths = make.constant(f"{name}.sizes", sizes)
    parts = make.several("Split", len(nodes), result, lengths, axis=-1)
    last = [add for add, _ in biases] or nodes
    replace_values([node.outputs[0] for node in last], parts)


def _join_constants(graph: ir.Graph, values: Any, name: str, axis: int) -> ir.Value:
    """Add a constant that joins `values` along an axis; they stay in the graph."""
    sizes = [[int(n) for n in value.shape] for value in values]
    shape = [*sizes[0]]
    shape[axis] = sum(size[axis] for size in sizes)

    def join(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate(arrays, axis=axis)

    return edits.add_derived(graph, name, values, join, shape)


def pack_projections(attention: ir.Node) -> None:
    """Make attention read packed query, key and value, if one Split makes all three."""
    split = producer(attention.inputs[0], "Split")
    if split is None or list(split.outputs) != list(attention.inputs[:3]):
        return
    for place, value in enumerate((split.inputs[0], None, None)):
        attention.replace_input_with(place, value)


def find_norms(graph: ir.Graph) -> None:
    """Replace x (mean(x^2) + e)^-0.5 w by RMSNormalization, in place."""
    for node in [node for node in graph if node.op_type == "Mul"]:
        x, root = node.inputs
        power = producer(root, "Pow")
        mean_and_small = power and producer(power.inputs[0], "Add")
        mean = mean_and_small and producer(mean_and_small.inputs[0], "ReduceMean")
        square = mean and producer(mean.inputs[0], "Pow")
        if x is None or power is None or mean_and_small is None or square is None:
            continue
        if square.inputs[0] is not x or x.dtype is None or not x.shape:
            continue
        numbers = [_number(n.inputs[1]) for n in (power, square, mean) if n]
        if numbers != [-0.5, 2.0, -1.0]:
            continue
        size, scaled = int(x.shape[-1]), _single_reader(node, "Mul")  # type: ignore
        read = [] if scaled is None else [*scaled.inputs]
        weight = next((v for v in read if v and v is not node.outputs[0]), None)
        stored = None if weight is None else weight.const_value
        if scaled is None or stored is None or stored.shape != (size,):
            ones, scaled = np.ones(size), node
            weight = Maker(graph, node).constant(f"ones_{size}", ones, x.dtype.numpy())
        make, small = Maker(graph, scaled), _number(mean_and_small.inputs[1])
        normed = make("RMSNormalization", x, weight, axis=-1, epsilon=small)
        replace_values(scaled.outputs, [normed])


def _number(value: ir.Value | None) -> float:
    """The number of a constant scalar; NaN for other values."""
    constant = value.const_value if value is not None else None
    return float("nan") if constant is None else float(constant.numpy().item())


def fuse_norms(graph: ir.Graph) -> None:
    """Merge Add and the RMSNormalization of its sum into one node with both results."""
    for norm in list(graph):
        if norm.op_type != "RMSNormalization" or norm.attributes.get_int("axis") != -1:
            continue
        value, weight = norm.inputs[:2]
        assert value is not None
        make = Maker(graph, norm)
        add, concat = producer(value, "Add"), producer(value, "Concat")
        joins_probes = concat is not None and producer(concat.inputs[0], "Add")
        if value.name == CUT or joins_probes:
            # Something else reads this sum. Add 0 in the fused norm all the same: the
            # last bits of RMSNormalization differ, and halves must equal the whole.
            dtype = (weight.dtype if weight else None) or ir.DataType.FLOAT
            zero = make.constant("no_skip", [0], dtype.numpy())
            normed, _ = _skip_norm(make, norm, value, make("Mul", value, zero))
            replace_values([norm.outputs[0]], [normed])
        elif add is not None and _same_shape(*add.inputs):
            both = _skip_norm(make, norm, *add.inputs)
            replace_values([norm.outputs[0], add.outputs[0]], both)


def _skip_norm(
    make: Maker, norm: ir.Node, *added: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """Add a node that adds two values and norms the sum; return norm and sum."""
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*added, norm.inputs[1]],
        {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
        domain=CONTRIB_DOMAIN,
        num_outputs=4,
    )
    # Outputs 1 and 2 are statistics that only training reads.
    fused.outputs[1].name = fused.outputs[2].name = ""
    normed, _, _, total = make.add(fused)
    return normed, total


def _same_shape(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Whether both have the shape [1, n, c], so that a sum does not broadcast."""
    if one is None or other is None or one.shape is None or other.shape is None:
        return False
    return same_rows(one.shape, other.shape) and bool(one.shape[1] == other.shape[1])


def drop_identity_reshapes(graph: ir.Graph) -> None:
    """Merge chains of Reshape, and drop those that keep the shape, in place."""
    for node in list(graph):
        if node.op_type != "Reshape":
            continue
        inner = producer(node.inputs[0], "Reshape")
        sizes = node.inputs[1].const_value if node.inputs[1] else None
        # A size of 0 is a copy of a size of the input.
        if inner is not None and sizes is not None and not (sizes.numpy() == 0).any():
            node.replace_input_with(0, inner.inputs[0])
        before, after = node.inputs[0], node.outputs[0]
        if after.is_graph_output():
            continue
        if before is not None and same_rows(before.shape, after.shape):
            ir.convenience.replace_all_uses_with(after, before)


def same_rows(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether the shapes of a value before and after Reshape are both [1, n, c]."""
    if shape is None or other is None or len(shape) != 3 or len(other) != 3:
        return False
    width = shape[2]
    return shape[0] == other[0] == 1 and isinstance(width, int) and width == other[2]


def fill_packets(graph: ir.Graph) -> None:
    """Let functions that have packets fill them with every row, see `PACKET`."""
    for node in [node for node in graph if node.op_type in ("Softplus", "Cos", "Sin")]:
        x, make = node.inputs[0], Maker(graph, node)
        if x is not None and x.dtype != ir.DataType.FLOAT:
            continue  # on GPUs, whose kernels have no packets
        width = x.shape[-1] if x is not None and x.shape is not None else None
        if isinstance(width, int) and width % PACKET == 0:
            continue
        copies = make.constant("packet", np.ones(PACKET), np.float32)
        filled = make("Mul", make("Unsqueeze", x, make.constant("last", [-1])), copies)
        result = make(node.op_type, filled)
        first = make("Gather", result, make.constant("first", 0), axis=-1)
        replace_values(node.outputs, [first])


def replace_gather_nd(graph: ir.Graph) -> None:
    """Replace GatherND of one axis by a Gather, in place; CUDA's takes no int32."""
    for node in list(graph):
        chosen = _first_axis_indices(node)
        if chosen is None:
            continue
        axis, data, replaced = 0, node.inputs[0], node
        turned = producer(data, "Transpose")
        back = _single_reader(node, "Transpose")
        if turned is not None and back is not None and len(chosen.shape or ()) == 1:
            both = (each.attributes["perm"].as_ints() for each in (turned, back))
            perm, inverse = ([int(i) for i in ints] for ints in both)
            if np.argsort(perm).tolist() == inverse:
                axis, data, replaced = perm[0], turned.inputs[0], back
        gathered = Maker(graph, replaced)("Gather", data, chosen, axis=axis)
        replace_values(replaced.outputs, [gathered])


def _first_axis_indices(node: ir.Node) -> ir.Value | None:
    """Return the indices of a GatherND over the first axis alone; None for others."""
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


def _single_reader(node: ir.Node, op_type: str) -> ir.Node | None:
    output = node.outputs[0]
    readers = [use.node for use in output.uses()]
    if output.is_graph_output() or len(readers) != 1 or readers[0].op_type != op_type:
        return None
    return readers[0]
