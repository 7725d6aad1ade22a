"""The attention nodes of a step graph, and their buffers in integers."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.export.step import Step, dtype_of
from jetdraft.native import DOMAIN
from jetdraft.quant.blocks import Floats
from jetdraft.quant.divergence import Windows
from jetdraft.quant.edits import Maker, initializer, new_value

OPSET = 24  # The first that has TensorScatter and Attention over a part of a buffer.
_BIAS_INPUTS = {"GroupQueryAttention": 10, "Attention": 3}
SCALE_INPUTS = 12, 13
SINKS_INPUT = 11  # GroupQueryAttention's input for the sinks of heads.
PAST_KEY = 3  # GroupQueryAttention's input for the past keys.
MASK = "draft_mask"  # The name of an input of step graphs.


def attentions(graph: ir.Graph) -> list[ir.Node]:
    """Return all GroupQueryAttention nodes: they read and write the KV buffers."""
    return [node for node in graph if node.op_type == "GroupQueryAttention"]


def is_shared(attention: ir.Node) -> bool:
    """Whether a layer reads another layer's buffers: it gives no keys of its own."""
    key = attention.inputs[1]
    return key is not None and key.shape is not None and key.shape[1] == 0


def windowed(graph: ir.Graph) -> bool:
    """Whether some layer attends in a sliding window, whose width counts slots."""
    widths = (n.attributes.get_int("local_window_size", -1) for n in attentions(graph))
    return any(width > 0 for width in widths)


def has_sinks(attention: ir.Node) -> bool:
    """Whether a sink takes a share of each row."""
    inputs = attention.inputs
    return len(inputs) > SINKS_INPUT and inputs[SINKS_INPUT] is not None


def find_bias(graph: ir.Graph) -> ir.Value | None:
    """Return the bias of the first attention that has one; None if none has."""
    for node in graph:
        place = _BIAS_INPUTS.get(node.op_type)
        if place is not None and len(node.inputs) > place and node.inputs[place]:
            return node.inputs[place]
    return None


def add_mask(graph: ir.Graph, contract: StepContract, name: str = MASK) -> ir.Value:
    """Add a mask to the inputs, and return the bias [1, 1, n, slots] made of it.

    Max and Min bound slots, since CUDA clips no int32; the CPU gathers lines fastest.
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
    own: Any = find_bias(graph)
    producer, both = own.producer(), ir.node("Add", [own, mask])
    for node in attentions(graph):
        node.replace_input_with(_BIAS_INPUTS[node.op_type], both.outputs[0])
    graph.insert_after(producer, both)


def use_own_attention(graph: ir.Graph) -> None:
    """Let `jetdraft.native` compute all attentions over buffers of floats, in place."""
    for node in attentions(graph):
        node.domain, attributes = DOMAIN, node.attributes
        for name in ("local_window_size", "do_rotary", "rotary_interleaved"):
            attributes[name] = ir.AttrInt64(name, max(attributes.get_int(name, 0), 0))
        softcap = attributes.get_float("softcap", 0.0)
        attributes["softcap"] = ir.AttrFloat32("softcap", softcap)


def measure_scales(
    model: Any, contract: StepContract, windows: Windows, bits: int
) -> list[Floats]:
    """Measure scales float32 [kv_heads * head_dim] of the buffers, in their order."""
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
        past: Any = node.inputs[PAST_KEY]
        layer = int(str(past.name).partition(".")[2])
        node.resize_inputs(max(SCALE_INPUTS) + 1)
        for place, kind in enumerate("kv"):
            array = scales[2 * layer + place]
            scale = initializer(graph, f"{kind}_scale.{layer}", array)
            node.replace_input_with(SCALE_INPUTS[place], scale)
            name = f"{kind}_quant_type"
            node.attributes[name] = ir.AttrString(name, "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", bits)
    return quantized
