"""One pass of a drafter as a torch module, and its contract, from what it declares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from jetdraft.checkpoints.attention import IMPLEMENTATION, StepState, attending
from jetdraft.checkpoints.heads.blocks import block_attention
from jetdraft.checkpoints.heads.draft_module import DraftInputs, DraftModule
from jetdraft.contracts.step_contract import TARGET_LENGTH, StepContract
from jetdraft.contracts.tensors import HIDDEN
from jetdraft.export import step
from jetdraft.export.source_step import SourceStep
from jetdraft.quant.edits import Maker


def make_draft_step(head: DraftModule, target: StepContract, dtype: str) -> step.Step:
    """Return the step module of a drafter beside a target of the contract `target`."""
    head.attend_with(IMPLEMENTATION)
    kind = SourceBlockStep if head.reads.source else DraftStep
    return kind(head, drafter_contract(head, target, dtype), ids=head.ids)


def drafter_contract(
    drafter: DraftModule, target: StepContract, dtype: str
) -> StepContract:
    """Make a drafter's contract beside a target's; raises `UnsupportedModelError`."""
    reads, config = drafter.reads, drafter.config
    width = config.feature_size
    shapes = tuple(enumerate(target.kv_shapes))
    read = (shapes[place] for place in drafter.target_layers)
    contract = replace(
        target,
        dtype=dtype,
        kv_shapes=drafter.kv_shapes(target),
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        feature_input=width if reads.features else 0,
        carried_size=width if reads.carries else 0,
        draft_vocab=0 if drafter.ids is None else len(drafter.ids),
        guesses=config.slots if reads.guesses else 0,
        streams=0,
        spare_slots=2 * drafter.block_rows if reads.guesses and reads.buffers else 0,
        reads=tuple((layer, *shape) for layer, shape in read if reads.target_kv),
        recent=config.slots - 1 if reads.windows else reads.tokens - 1,
        ahead=config.slots if reads.windows else 0,
        states=(),
        experts=0,
    )
    if (0, 0) not in contract.kv_shapes:
        return contract
    row = torch.zeros(1, 1, dtype=torch.long)
    features = torch.zeros(1, 1, contract.feature_input, dtype=step.dtype_of(contract))
    given = DraftInputs(row, row, row[0], features)
    state = step.run_one_row(drafter, lambda c: drafter.draft(replace(given, cache=c)))
    measured = tuple((key.shape[1], key.shape[3]) for key, _ in state.past)
    return replace(contract, kv_shapes=measured)


class DraftStep(step.Step):
    """One pass of a drafter over fixed buffers; its candidates are the target's ids."""

    def forward(self, *inputs: Any) -> list[Tensor]:
        *rows, past = inputs
        contract, names = self.contract, (spec.name for spec in self.contract.inputs)
        read: dict[str, Tensor] = dict(zip(names, rows, strict=False))
        tokens, positions, cursor, total_length, answer_rows = rows[:5]
        given = DraftInputs(tokens, positions, answer_rows)
        if "features" in read:
            given.features = read["features"].to(step.dtype_of(contract))
        given.recent = read.get("recent_ids", given.recent)
        if contract.block:
            state = self._add_block(given, read, past)
        else:
            state = step.make_state(positions, cursor, total_length, past)
        if contract.reads:
            given.target_length = read[TARGET_LENGTH.name]
            buffers = [read[spec.name] for spec in contract.target_kv]
            given.target = list(zip(buffers[::2], buffers[1::2], strict=True))
        with attending(state):
            logits, carried = self.model.draft(given)
        own = [] if carried is None else [carried.float()]
        found = step.answers(logits.float(), self.ids)
        return [*found, *own, *step.present_buffers(state)]

    def _add_block(
        self, given: DraftInputs, read: dict[str, Tensor], past: list[Tensor]
    ) -> StepState:
        """Add the block to `given`, after the rows; return the state of the pass."""
        positions, size = given.positions, self.model.block_rows
        first = positions[:, -1:] + 1
        given.block = read["block"]
        if self.model.reads.anchored:
            block = torch.cat([given.tokens[:, -1:], given.block], dim=1)
            given.block = block[:, :size]
        given.positions = torch.cat([positions, first + torch.arange(size)], dim=1)
        lengths = read["cursor"], read["total_length"]
        return make_block_state(given.positions, *lengths, past, size, self.contract)


def make_block_state(
    positions: Tensor,
    cursor: Tensor,
    total_length: Tensor,
    past: list[Tensor],
    size: int,
    contract: StepContract,
) -> StepState:
    """Return the state of a pass over rows and block, at `positions` int64 [1, n + m].

    Behind them are the m = `size` queries of the block, see `checkpoints.heads.blocks`.
    """
    filled = cursor + step.count_on_device(positions)
    slots = torch.arange(contract.slots, dtype=torch.int32)
    hidden = (slots >= filled).to(step.dtype_of(contract)) * HIDDEN
    rows = torch.cat([positions, positions[:, -size:]], dim=1)
    # Added to a zero for each row, since a shape would be computed on the host.
    bias = (rows * 0).to(hidden.dtype)[:, None, :, None] + hidden
    return StepState(
        cursor=cursor,
        last_row=filled + size - 1,
        total_length=total_length,
        past=list(zip(past[::2], past[1::2], strict=True)),
        bias=bias,
    )


class SourceBlockStep(SourceStep):
    """One pass of a drafter that reads a source, and fills a block of tokens."""

    @property
    def decoder(self) -> Any:
        return self.model.model

    def forward(self, *inputs: Any) -> list[Tensor]:
        input_ids, position_ids, cursor, total_length, _, *others = inputs
        block, source_length, *cross, past = others
        size = self.contract.block
        slots = torch.arange(size)
        block = torch.where(block < self.model.config.vocab_size, block, block + slots)
        behind = position_ids[:, -1:] + 1 + slots
        positions = torch.cat([position_ids, behind], dim=1)
        lengths = cursor, total_length
        plain = make_block_state(positions, *lengths, past, size, self.contract)
        # The queries of a block follow its keys in further rows.
        rows = torch.cat([positions, behind], dim=1)
        distances = self.slot_distance_bias(rows, positions, cursor, True)
        bias: Any = plain.bias
        bias = bias if distances is None else bias + distances.to(bias.dtype)
        state = self.source_state(plain, source_length, bias)
        state.own = block_attention(size, context_asks=True)
        with attending(state):
            logits = self.model(
                torch.cat([input_ids, block], dim=1),
                positions,
                (slice(None), slice(-size, None)),
                **self.model_inputs(list(zip(cross[::2], cross[1::2], strict=True))),
            )
        return [*step.answers(logits, self.ids), *step.present_buffers(state)]


def slice_target_buffers(file: Path, contract: StepContract) -> None:
    """Make a graph on disk read only committed rows of the target's buffers."""
    model = ir.load(file)
    graph = model.graph
    inputs, make = {value.name: value for value in graph.inputs}, Maker(graph, graph[0])
    numbers = {"first": 0, "axis": 2, "step": 1}.items()
    first, axis, by = (make.constant(f"committed.{n}", [i]) for n, i in numbers)
    # Without a row there would be nothing to take a softmax of.
    one = make.constant("committed.one", [1], np.int32)
    least = make("Max", inputs[TARGET_LENGTH.name], one)
    end = make("Cast", least, to=ir.DataType.INT64)
    for spec in contract.target_kv:
        buffer = inputs[spec.name]
        readers = list(buffer.uses())
        committed = make("Slice", buffer, first, end, axis, by)
        for node, index in readers:
            node.replace_input_with(index, committed)
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    ir.save(model, file)
