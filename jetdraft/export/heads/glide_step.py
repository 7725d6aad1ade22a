"""One pass of a GliDe drafter as a torch module, to be traced like a decoder's pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from jetdraft.bundle import DRAFTER, TARGET
from jetdraft.checkpoints.attention import IMPLEMENTATION, HandThrough, attending
from jetdraft.checkpoints.heads.attached.glide import Glide
from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.step_contract import TARGET_LENGTH, StepContract
from jetdraft.errors import OptionError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.heads.layer_contract import layer_contract
from jetdraft.export.step import Step, dtype_of, presents, state_of
from jetdraft.quant.edits import initializer


class GlideStep(Step):
    """One pass over rows and the target's buffers; see `Step`.

    trace(GlideStep(drafter, contract), checkpoint.names())
    """

    def __init__(self, drafter: Glide, contract: StepContract) -> None:
        super().__init__(drafter, contract, ids=drafter.ids)
        drafter.attend_with(IMPLEMENTATION)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        *inputs: Any,
    ) -> list[torch.Tensor]:
        """The outputs in the order of `StepContract.outputs`.

        The inputs after `answer_rows` are the target's length, its keys and values, and
        the buffers.
        """
        target_length, keys, values, past = inputs
        state = state_of(position_ids, cursor, total_length, past)
        slots = torch.arange(keys.shape[2])
        bias = (slots >= target_length).to(dtype_of(self.contract)) * HIDDEN
        with attending(state):
            hidden = self.model(
                input_ids,
                position_ids,
                keys,
                values,
                bias[None, None, None],
                HandThrough(),
            )
        logits = self.model.lm_head(hidden[:, answer_rows]).float()
        return [*self.answers(logits), *presents(state)]


def check_lent(options: ExportOptions) -> None:
    """Raise `OptionError` for a target whose buffers a drafter cannot read."""
    recipe = options.recipe
    one_type = options.dtype_of(TARGET) == options.dtype_of(DRAFTER)
    if (recipe is not None and recipe.kv) or not one_type:
        raise OptionError(
            "GliDe reads the target's buffers in floats of its own type; leave kv out "
            "of the recipe, and give both one --dtype"
        )


def glide_contract(drafter: Glide, target: StepContract, dtype: str) -> StepContract:
    """The contract of a drafter's graph beside its target's."""
    config, layer = drafter.config, len(target.kv_shapes) - 1
    contract = layer_contract(config, drafter.ids, target, dtype)
    return replace(contract, reads=((layer, *target.kv_shapes[layer]),))


def read_less(file: Path, contract: StepContract) -> None:
    """Let a graph read the committed rows of the lent buffers only, not all slots.

    A slice costs as much as the text is long; a mask alone as much as the buffers.
    """
    model = ir.load(file)
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    first, axis, step = (
        initializer(graph, f"committed.{name}", np.array([number], np.int64))
        for name, number in (("first", 0), ("axis", 2), ("step", 1))
    )
    # Without a row there would be nothing to take a softmax of.
    one = initializer(graph, "committed.one", np.array([1], np.int32))
    least = ir.node("Max", [inputs[TARGET_LENGTH.name], one])
    end = ir.node("Cast", [least.outputs[0]], {"to": ir.DataType.INT64})
    nodes = [least, end]
    for spec in contract.lent:
        buffer = inputs[spec.name]
        readers = list(buffer.uses())
        cut = ir.node("Slice", [buffer, first, end.outputs[0], axis, step])
        for node, index in readers:
            node.replace_input_with(index, cut.outputs[0])
        nodes.append(cut)
    graph.insert_before(graph[0], nodes)
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    ir.save(model, file)
