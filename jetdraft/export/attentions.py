"""The attention nodes of a step graph, in both flavours."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.step_contract import StepContract
from jetdraft.quant.edits import initializer, substitute, value_of

_BIAS_INPUTS = {"GroupQueryAttention": 10, "Attention": 3}
_LAST_ROW, _TOTAL_LENGTH, _POSITIONS = 5, 6, 9
"""GroupQueryAttention's inputs that say where its rows are."""

_ATTENDED = "attended_rows"
"""The axis of the rows that attend, and the value that has their shape in a bias."""


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


def bias_of(graph: ir.Graph) -> ir.Value | None:
    """The bias of the attentions that have one."""
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is not None and len(node.inputs) > place and node.inputs[place]:
            return node.inputs[place]
    return None


def widened(
    graph: ir.Graph, contract: StepContract, name: str = "draft_mask"
) -> ir.Value:
    """The bias [1, 1, n, slots] that the mask of new inputs means.

    The inputs are `name` and `draft_start`. CUDA clips no int32, so slots are
    bounded by Max and Min. To gather lines takes the CPU a seventh of the time that it
    takes to gather columns.
    """
    mask, start = (value_of(spec) for spec in contract.mask)
    mask.name = name
    graph.inputs.append(mask)
    start = next((v for v in graph.inputs if v.name == start.name), start)
    if not start.is_graph_input():
        graph.inputs.append(start)
    nodes: list[ir.Node] = []

    def make(kind: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        nodes.append(ir.node(kind, inputs, attributes))  # type: ignore[arg-type]
        return nodes[-1].outputs[0]

    def constant(suffix: str, numbers: object, dtype: str = "int32") -> ir.Value:
        return initializer(graph, f"{name}.{suffix}", np.array(numbers, dtype))

    dtype = ir.DataType.from_numpy(np.dtype(contract.dtype))
    hidden = constant("hidden", [HIDDEN], contract.dtype)
    lines = make("Mul", make("Cast", mask, to=dtype), hidden)
    slots = constant("slots", np.arange(1, contract.slots + 1))
    line = make("Max", make("Sub", slots, start), constant("first", [0]))
    line = make("Min", line, constant("last", [contract.draft_slots]))
    by_slot = make("Gather", lines, line, axis=0)
    axes = constant("axes", [0, 1], "int64")
    bias = make("Unsqueeze", make("Transpose", by_slot, perm=[1, 0]), axes)
    graph.insert_before(graph[0], nodes)
    return bias


def add_bias(graph: ir.Graph, bias: ir.Value) -> None:
    """Add `bias` to the scores of every attention that has no bias yet, in place."""
    bias = _attended(graph, bias)
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is None:
            continue
        if len(node.inputs) <= place:
            node.resize_inputs(place + 1)
        if node.inputs[place] is None:
            node.replace_input_with(place, bias)


def sum_bias(graph: ir.Graph, bias: ir.Value) -> None:
    """Add `bias` to the bias that all attentions have already, in place.

    The new bias has no heads; the attentions' own, by distance, has all of them.
    """
    own = bias_of(graph)
    producer = own.producer() if own is not None else None
    assert own is not None
    assert producer is not None
    both = ir.node("Add", [own, bias])
    for node in attentions(graph):
        node.replace_input_with(_BIAS_INPUTS[node.op_type], both.outputs[0])
    graph.insert_after(producer, both)


class _Twins:
    """The values by which a single row becomes two equal rows, and two become one."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.first = attentions(graph)[0]
        self.one = self.constant("one", [1])
        self.rows = self.make("Shape", graph.inputs[0], start=1, end=2)
        count = self.make("Max", self.rows, self.constant("two", [2]))
        self.row_shape = self.make("Concat", self.one, count, self.one, axis=0)
        self.position_shape = self.make("Concat", self.one, count, axis=0)
        self.row_shape.name = _ATTENDED
        added = self.make("Sub", count, self.rows)
        self.added = self.make("Cast", added, to=ir.DataType.INT32)

    def constant(self, name: str, number: object, kind: type = np.int64) -> ir.Value:
        """A constant of the graph."""
        return initializer(self.graph, f"twins.{name}", np.array(number, kind))

    def make(self, kind: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        """A new node's output."""
        node = ir.node(kind, list(inputs), attributes)
        self.graph.insert_before(self.first, node)
        return node.outputs[0]


def attend_as_two(graph: ir.Graph) -> None:
    """Let a pass of one row attend as two equal rows, in place.

    onnxruntime multiplies one row with another kernel than several rows, and the last
    bits differ. With its row twice, attention has the bits of wider passes, and all
    other operators run on one row only. The second row fills the slot after the first,
    so the buffers need a spare slot.
    """
    twins = _Twins(graph)
    first, one = twins.first, twins.constant("one32", [1], np.int32)
    last = twins.make("Add", first.inputs[_LAST_ROW], twins.added)
    filled = twins.make("Add", last, one)
    total = twins.make("Max", first.inputs[_TOTAL_LENGTH], filled)
    start = twins.constant("start", [0])
    expanded: dict[ir.Value, ir.Value] = {}
    for node in attentions(graph):
        for place in (0, 1, 2, _POSITIONS):
            rows = node.inputs[place] if place < len(node.inputs) else None
            if rows is None:
                continue
            if rows not in expanded:
                shape = twins.row_shape if place != _POSITIONS else twins.position_shape
                expand = ir.node("Expand", [rows, shape])
                graph.insert_before(node, expand)
                expanded[rows] = expand.outputs[0]
            node.replace_input_with(place, expanded[rows])
        node.replace_input_with(_LAST_ROW, last)
        node.replace_input_with(_TOTAL_LENGTH, total)
        output = node.outputs[0]
        answer = ir.node("Slice", [output, start, twins.rows, twins.one])
        substitute([output], answer.outputs)
        answer.replace_input_with(0, output)
        if output.shape is not None:
            output.shape = ir.Shape([1, _ATTENDED, output.shape[2]])
        graph.insert_after(node, answer)


def _attended(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    """The bias with a row for each row that attends, after `attend_as_two`."""
    node = next((node for node in graph if node.outputs[0].name == _ATTENDED), None)
    if node is None:
        return bias
    expand = ir.node("Expand", [bias, node.outputs[0]])
    graph.insert_after(node, expand)
    return expand.outputs[0]
