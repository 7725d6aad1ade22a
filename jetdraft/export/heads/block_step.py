"""One pass of a block drafter as a torch module, to be traced like a decoder's pass.

The attention operator is causal, so the rows of a block attend twice: first their keys
and values are written, then their queries follow in further rows. The keys of those
rows are copies, which the bias hides from everybody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.attention import StepState, attend, attending
from jetdraft.checkpoints.heads.block_drafter import Attention, BlockDrafter
from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.step import Step, count, dtype_of, presents


class BlockStep(Step):
    """The guesses for the tokens of a block, as the contract declares; see `Step`.

    trace(BlockStep(drafter, contract), checkpoint.names())
    """

    def __init__(self, drafter: BlockDrafter, contract: StepContract) -> None:
        super().__init__(drafter, contract, ids=drafter.ids)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cursor: Tensor,
        total_length: Tensor,
        answer_rows: Tensor,
        *inputs: Any,
    ) -> list[Tensor]:
        """The outputs in the order of `StepContract.outputs`.

        The inputs after `answer_rows` are features if the drafter reads them, the
        block, and the buffers.
        """
        *features, block, past = inputs
        drafter: BlockDrafter = self.model
        if drafter.reads_text:
            context, first = input_ids, position_ids[:, -1:] + 1
        else:
            (rows,) = features
            context, first = rows.to(dtype_of(self.contract)), position_ids[:, -1:] + 1
            block = torch.cat([input_ids[:, -1:], block], dim=1)
        size = drafter.block_rows
        positions = torch.cat([position_ids, first + torch.arange(size)], dim=1)
        state = block_state(positions, cursor, total_length, past, size, self.contract)
        attention = both_ways(size, drafter.reads_text)
        with attending(state):
            states = drafter(context, block, positions, attention)
        logits = drafter.lm_head(drafter.guessed(states)).float()
        return [*self.answers(logits), *presents(state)]


def block_state(
    positions: Tensor,
    cursor: Tensor,
    total_length: Tensor,
    past: list[Tensor],
    size: int,
    contract: StepContract,
) -> StepState:
    """The state of a pass over rows at `positions` int64 [1, n + m], m the `size`.

    Attention has m rows more: the queries of the block, whose slots the bias hides.
    """
    filled = cursor + count(positions)
    slots = torch.arange(contract.slots, dtype=torch.int32)
    hidden = (slots >= filled).to(dtype_of(contract)) * HIDDEN
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


def both_ways(size: int, context_asks: bool) -> Attention:
    """Attention in both directions inside the last `size` rows, over the buffers.

    If the context before them has queries, its rows attend to the rows up to their own.
    """

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        idle = torch.cat([key * 0] * groups, dim=1)
        before = idle
        if context_asks:
            before = torch.cat([query[:, :, :-size], idle[:, :, -size:]], dim=2)
        twice = [
            torch.cat([first, last[:, :, -size:]], dim=2)
            for first, last in ((before, query), (key, key), (value, value))
        ]
        mixed, _ = attend(module, twice[0], twice[1], twice[2], None, module.scaling)
        if not context_asks:
            return mixed[:, -size:]
        return torch.cat([mixed[:, : -2 * size], mixed[:, -size:]], dim=1)

    return attention


def block_contract(
    drafter: BlockDrafter, target: StepContract, dtype: str
) -> StepContract:
    """The contract of a block drafter's graph beside its target's."""
    config = drafter.config
    return replace(
        target,
        dtype=dtype,
        kv_shapes=((config.num_kv_heads, config.head_dim),) * config.num_layers,
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        feature_input=0 if drafter.reads_text else config.feature_size,
        draft_vocab=0 if drafter.ids is None else len(drafter.ids),
        guesses=config.slots,
        streams=0,
        spare_slots=2 * drafter.block_rows,
    )
