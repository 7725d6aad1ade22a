"""Integer KV buffers: attention quantizes new rows, with a scale per channel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.attentions import attentions
from jetdraft.export.step import Step, dtype_of
from jetdraft.quant.blocks import Floats
from jetdraft.quant.calibration import Windows
from jetdraft.quant.edits import initializer, new_value

SCALE_INPUTS = 12, 13
"""GroupQueryAttention's inputs for the scales of keys and of values."""

PAST_KEY = 3
"""GroupQueryAttention's input for the past keys."""


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
