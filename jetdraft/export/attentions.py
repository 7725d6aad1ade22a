"""The attention nodes of a step graph, and their buffers in integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from jetdraft import native
from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.step import Step, dtype_of
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows
from jetdraft.quant.edits import Maker, initializer, new_value, replace_values

OPSET = 24
"""The first that has TensorScatter and Attention over a part of a buffer."""

_BIAS_INPUTS = {"GroupQueryAttention": 10, "Attention": 3}
_LAST_ROW, _TOTAL_LENGTH, _POSITIONS = 5, 6, 9
"""GroupQueryAttention's inputs that say where its rows are."""

SCALE_INPUTS = 12, 13
"""GroupQueryAttention's inputs for the scales of keys and of values."""

_OWN_INPUTS = 11
"""The inputs that attention of `jetdraft.native` has, up to the bias."""

PAST_KEY = 3
"""GroupQueryAttention's input for the past keys."""

_ATTENDED = "attended_rows"
"""The axis of the rows that attend, and the value that has their shape in a bias."""


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """Return all GroupQueryAttention nodes: they read and write the KV buffers."""
    return [node for node in graph if node.op_type == "GroupQueryAttention"]


def windowed(graph: ir.Graph) -> bool:
    """Whether some layer attends in a sliding window, whose width counts slots."""
    return any(
        node.attributes.get_int("local_window_size", -1) > 0
        for node in attentions(graph)
    )


def find_bias(graph: ir.Graph) -> ir.Value | None:
    """Return the bias of the first attention that has one; None if none has."""
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is not None and len(node.inputs) > place and node.inputs[place]:
            return node.inputs[place]
    return None


def add_mask(
    graph: ir.Graph, contract: StepContract, name: str = "draft_mask"
) -> ir.Value:
    """Add a mask to the inputs, and return the bias [1, 1, n, slots] made of it.

    The inputs are `name` and `draft_start`. CUDA clips no int32, so slots are bounded
    by Max and Min. The CPU gathers lines seven times as fast as columns.
    """
    mask, start = (new_value(spec) for spec in contract.mask_inputs)
    mask.name = name
    graph.inputs.append(mask)
    start = next((v for v in graph.inputs if v.name == start.name), start)
    if not start.is_graph_input():
        graph.inputs.append(start)
    make = Maker(graph, graph[0])

    def constant(suffix: str, numbers: object, dtype: str = "int32") -> ir.Value:
        return make.constant(f"{name}.{suffix}", numbers, dtype)

    dtype = ir.DataType.from_numpy(np.dtype(contract.dtype))
    hidden = constant("hidden", [HIDDEN], contract.dtype)
    lines = make("Mul", make("Cast", mask, to=dtype), hidden)
    slots = constant("slots", np.arange(1, contract.slots + 1))
    line = make("Max", make("Sub", slots, start), constant("first", [0]))
    line = make("Min", line, constant("last", [contract.draft_slots]))
    by_slot = make("Gather", lines, line, axis=0)
    axes = constant("axes", [0, 1], "int64")
    return make("Unsqueeze", make("Transpose", by_slot, perm=[1, 0]), axes)


def add_bias(graph: ir.Graph, bias: ir.Value) -> None:
    """Add `bias` to the scores of every attention that has no bias yet, in place."""
    bias = _expand_bias(graph, bias)
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is None:
            continue
        if len(node.inputs) <= place:
            node.resize_inputs(place + 1)
        if node.inputs[place] is None:
            node.replace_input_with(place, bias)


def add_to_position_bias(graph: ir.Graph, mask: ir.Value) -> None:
    """Add `mask` [1, 1, n, slots] to the position bias that all attentions share."""
    own = find_bias(graph)
    assert own is not None
    producer = own.producer()
    assert producer is not None
    both = ir.node("Add", [own, mask])
    for node in attentions(graph):
        node.replace_input_with(_BIAS_INPUTS[node.op_type], both.outputs[0])
    graph.insert_after(producer, both)


def use_own_attention(graph: ir.Graph) -> None:
    """Let `jetdraft.native` compute the attentions that it can compute, in place.

    It has the same inputs, and needs all attributes.
    """
    for node in attentions(graph):
        number = node.attributes.get_int
        past = node.inputs[PAST_KEY]
        size = past.shape[3] if past is not None and past.shape is not None else 0
        further = [value for value in node.inputs[_OWN_INPUTS:] if value is not None]
        if (
            not isinstance(size, int)
            or not size
            or size % 16
            or further
            or number("smooth_softmax", 0)
            or node.attributes.get_float("softcap", 0.0)
        ):
            continue
        node.resize_inputs(_OWN_INPUTS)
        node.domain = native.DOMAIN
        window = max(number("local_window_size", -1), 0)
        integers = {"local_window_size": window, "do_rotary": number("do_rotary", 0)}
        integers["rotary_interleaved"] = number("rotary_interleaved", 0)
        for name, value in integers.items():
            node.attributes[name] = ir.AttrInt64(name, value)
        scale = node.attributes.get_float("scale", 0.0) or size**-0.5
        node.attributes["scale"] = ir.AttrFloat32("scale", scale)
    graph.opset_imports[native.DOMAIN] = 1


def attend_as_two(graph: ir.Graph) -> None:
    """Let a pass of one row attend as two equal rows, in place.

    onnxruntime multiplies one row with another kernel than several rows, and the last
    bits differ. With its row twice, attention has the bits of wider passes, and all
    other operators run on one row only. The second row fills the slot after the first,
    so the buffers need a spare slot.
    """
    theirs = [n for n in attentions(graph) if n.domain != native.DOMAIN]
    if not theirs:
        return
    first = theirs[0]
    make = Maker(graph, first)
    one, two = make.constant("twins.one", [1]), make.constant("twins.two", [2])
    own_rows = make("Shape", graph.inputs[0], start=1, end=2)
    count = make("Max", own_rows, two)
    row_shape = make("Concat", one, count, one, axis=0)
    position_shape = make("Concat", one, count, axis=0)
    row_shape.name = _ATTENDED
    added = make("Cast", make("Sub", count, own_rows), to=ir.DataType.INT32)
    last = make("Add", first.inputs[_LAST_ROW], added)
    filled = make("Add", last, make.constant("twins.one32", [1], np.int32))
    total = make("Max", first.inputs[_TOTAL_LENGTH], filled)
    start = make.constant("twins.start", [0])
    expanded: dict[ir.Value, ir.Value] = {}
    for node in theirs:
        for place in (0, 1, 2, _POSITIONS):
            rows = node.inputs[place] if place < len(node.inputs) else None
            if rows is None:
                continue
            if rows not in expanded:
                shape = row_shape if place != _POSITIONS else position_shape
                expanded[rows] = Maker(graph, node)("Expand", rows, shape)
            node.replace_input_with(place, expanded[rows])
        node.replace_input_with(_LAST_ROW, last)
        node.replace_input_with(_TOTAL_LENGTH, total)
        output = node.outputs[0]
        answer = ir.node("Slice", [output, start, own_rows, one])
        replace_values([output], answer.outputs)
        answer.replace_input_with(0, output)
        if output.shape is not None:
            output.shape = ir.Shape([1, _ATTENDED, output.shape[2]])
        graph.insert_after(node, answer)


def _expand_bias(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    """Return the bias with a row for each attending row, after `attend_as_two`."""
    node = next((node for node in graph if node.outputs[0].name == _ATTENDED), None)
    if node is None:
        return bias
    expand = ir.node("Expand", [bias, node.outputs[0]])
    graph.insert_after(node, expand)
    return expand.outputs[0]


def measure_scales(
    model: Any, contract: StepContract, windows: Windows, bits: int
) -> list[Floats]:
    """Measure scales float32 [kv_heads * head_dim] of buffers, in the contract's order.

    A channel's largest magnitude over the text becomes the largest integer of `bits`.
    """
    step, dtype = Step(model, contract), dtype_of(contract)
    specs = contract.buffers("past")
    largest: list[torch.Tensor] = []
    for ids in windows.ids[:, : contract.capacity]:
        rows = len(ids)
        with torch.no_grad():
            outputs = step(
                ids[None],
                torch.arange(rows)[None],
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([rows], dtype=torch.int32),
                torch.tensor([rows - 1]),
                [torch.zeros(spec.shape_for(), dtype=dtype) for spec in specs],
            )
        peaks = [x.abs().amax(2)[0].flatten() for x in outputs[-len(specs) :]]
        pairs = zip(largest, peaks, strict=True) if largest else ()
        largest = [torch.maximum(*pair) for pair in pairs] or peaks
    largest_integer = (1 << (bits - 1)) - 1
    return [(x.clamp(min=1e-6) / largest_integer).float().numpy() for x in largest]


def quantize_cache(
    model: ir.Model, contract: StepContract, scales: list[Floats], bits: int
) -> StepContract:
    """Let a graph's attentions use int8 buffers, in place; return its new contract."""
    quantized, graph = replace(contract, kv_bits=bits), model.graph
    for side, values in (("past", graph.inputs), ("present", graph.outputs)):
        by_name = {value.name: value for value in values}
        for spec in quantized.buffers(side):
            declared, value = new_value(spec), by_name[spec.name]
            value.type, value.shape = declared.type, declared.shape
    for node in attentions(graph):
        past = node.inputs[PAST_KEY]
        assert past is not None
        layer = int(str(past.name).partition(".")[2])
        node.resize_inputs(max(SCALE_INPUTS) + 1)
        for place, kind in enumerate("kv"):
            array = scales[2 * layer + place]
            scale = initializer(graph, f"{kind}_scale.{layer}", array)
            node.replace_input_with(SCALE_INPUTS[place], scale)
            node.attributes[f"{kind}_quant_type"] = ir.AttrString(
                f"{kind}_quant_type", "PER_CHANNEL"
            )
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", bits)
    return quantized
