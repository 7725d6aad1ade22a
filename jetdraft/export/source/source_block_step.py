"""One pass of a block drafter that reads a source, to be traced like a decoder's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.attention import attending
from jetdraft.checkpoints.heads.attached.source_drafter import SourceDrafter
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.heads.block_step import block_state, both_ways
from jetdraft.export.source.source_step import SourceStep
from jetdraft.export.step import presents


class SourceBlockStep(SourceStep):
    """The guesses for the tokens of a block, as the contract declares; see `Step`.

    trace(SourceBlockStep(drafter, contract), checkpoint.names())
    """

    def __init__(self, drafter: SourceDrafter, contract: StepContract) -> None:
        super().__init__(drafter, contract, ids=drafter.ids)

    @property
    def decoder(self) -> Any:
        """The model of transformers."""
        return self.model.model

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

        The inputs after `answer_rows` are the block, the source's length, the cross
        buffers and the past.
        """
        block, source_length, *cross, past = inputs
        size = self.contract.block
        slots = torch.arange(size)
        block = torch.where(block < self.model.config.vocab_size, block, block + slots)
        behind = position_ids[:, -1:] + 1 + slots
        positions = torch.cat([position_ids, behind], dim=1)
        plain = block_state(positions, cursor, total_length, past, size, self.contract)
        # The queries of a block follow its keys in further rows, see `block_step`.
        rows = torch.cat([positions, behind], dim=1)
        bias, distances = plain.bias, self.distances(rows, positions, cursor, True)
        assert bias is not None
        bias = bias if distances is None else bias + distances.to(bias.dtype)
        state = self.reading(plain, source_length, bias)
        state.own = both_ways(size, context_asks=True)
        with attending(state):
            logits = self.model(
                torch.cat([input_ids, block], dim=1),
                positions,
                (slice(None), slice(-size, None)),
                **self.encoded(list(zip(cross[::2], cross[1::2], strict=True))),
            )
        return [*self.answers(logits), *presents(state)]


def source_block_contract(
    drafter: SourceDrafter, target: StepContract, dtype: str
) -> StepContract:
    """The contract of a drafter's graph beside its target's."""
    config = drafter.config
    return replace(
        target,
        dtype=dtype,
        kv_shapes=target.kv_shapes[: config.num_layers],
        guesses=config.slots,
        spare_slots=2 * config.slots,
    )
