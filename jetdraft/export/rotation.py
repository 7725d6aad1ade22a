"""Attention rotates query and key itself, with tables of cosines and sines by slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from jetdraft.ort import ort
from jetdraft.quant.edits import CONTRIB_DOMAIN, Maker, initializer, producer


class RotationInHalves(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    """Rewrites x cos + rotate_half(x) sin to RotaryEmbedding, in float16 too."""

    def __init__(self) -> None:
        # Cosine and sine are shared by all layers, so they stay.
        super().__init__(remove_nodes=False)

    def pattern(
        self, op: Any, x: Any, angles: Any, ends: Any, starts: Any, dtype: Any
    ) -> Any:
        """Return the subgraph that is replaced."""
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
        """Match only if x is split in its middle."""
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
        """Return the RotaryEmbedding that takes its place."""
        cosine, sine = (op.Cast(f(angles), to=dtype) for f in (op.Cos, op.Sin))
        heads = x.shape[1] if x.shape else 0
        return op.RotaryEmbedding(x, cosine, sine, interleaved=0, num_heads=heads)


class RotaryTables:
    """Tables of cosines and sines by position, computed by the traced graph itself.

    The nodes that compute them are run once for the positions 0..capacity-1. Positions
    are the input `position_ids`, or a Concat of it and the positions of the probes.
    """

    def __init__(self, model: ir.Model, capacity: int) -> None:
        self.graph = model.graph
        ids = model.graph.inputs[1]
        with_probes = [n.outputs[0] for n in ids.consumers() if n.op_type == "Concat"]
        self.positions = [ids, *with_probes]
        self.capacity = capacity
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value] | None] = {}

    def table_of(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        """Return `value` as a table [capacity, d/2], and its positions; or None."""
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
        """Run a part of the graph for all positions; add the result as a constant."""
        proto = ir.serde.serialize_model(ir.Model(part, ir_version=10))
        session = ort.InferenceSession(
            proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        positions = np.arange(self.capacity)[None]
        [table] = session.run(None, {source.name: positions})
        return initializer(self.graph, name, np.ascontiguousarray(table[0]))


def fuse_rotation(
    graph: ir.Graph, attention: ir.Node, tables: RotaryTables, beside: bool
) -> None:
    """Let attention, or nodes `beside` it, rotate query and key, if both match."""
    query, key = (_find_rotation(attention.inputs[i]) for i in (0, 1))
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
    cosines, sines = (tables.table_of(value) for value in rotation.inputs[1:3] if value)
    if cosines is None or sines is None:
        return
    if cosines[1] is not sines[1]:
        return
    for flatten, _, source in (query, key):
        flatten.replace_input_with(0, source)
    rotate = _rotate_by_nodes if beside else _rotate_in_attention
    rotate(graph, attention, (cosines[0], sines[0], cosines[1]), interleaved)


Tables = tuple[ir.Value, ir.Value, ir.Value]
"""Cosines and sines [capacity, d / 2], and the positions that choose their rows."""


def _rotate_in_attention(
    graph: ir.Graph, attention: ir.Node, tables: Tables, interleaved: int
) -> None:
    """Make attention rotate query and key, in place."""
    for name, number in (("do_rotary", 1), ("rotary_interleaved", interleaved)):
        attention.attributes[name] = ir.AttrInt64(name, number)
    attention.resize_inputs(max(10, len(attention.inputs)))
    for index, value in zip((7, 8, 9), tables, strict=True):
        attention.replace_input_with(index, value)


def _rotate_by_nodes(
    graph: ir.Graph, attention: ir.Node, tables: Tables, interleaved: int
) -> None:
    """Add a RotaryEmbedding for query and one for key before attention."""
    cosines, sines, positions = tables
    for place in (0, 1):
        rows = attention.inputs[place]
        rotated = Maker(graph, attention)(
            "RotaryEmbedding",
            *(rows, positions, cosines, sines),
            domain=CONTRIB_DOMAIN,
            interleaved=interleaved,
        )
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
    swaps = node is not None and node.attributes.get_ints("perm") == (0, 2, 1, 3)
    return node if swaps else None
