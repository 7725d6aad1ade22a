"""One pass of a Falcon drafter as a torch module, traced like a decoder's pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from jetdraft.checkpoints.attention import IMPLEMENTATION, HandThrough, attending
from jetdraft.checkpoints.heads.attached.falcon import Falcon
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.heads.layer_contract import layer_contract
from jetdraft.export.step import Step, dtype_of, presents, state_of


class FalconStep(Step):
    """One pass over rows and their windows; see `Step`.

    Its attention is causal: what lets a row see the rows behind it in its block is the
    mask of a tree, where the runtime has a copy of the row behind the block.

        trace(FalconStep(drafter, contract), checkpoint.names())
    """

    def __init__(self, drafter: Falcon, contract: StepContract) -> None:
        super().__init__(drafter, contract, ids=drafter.ids)
        drafter.attend_with(IMPLEMENTATION)

    def forward(  # type: ignore[override]  # a drafter reads more than its own token
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cursor: Tensor,
        total_length: Tensor,
        answer_rows: Tensor,
        recent_ids: Tensor,
        features: Tensor,
        past: list[Tensor],
    ) -> list[Tensor]:
        """The outputs in the order of `StepContract.outputs`."""
        state = state_of(position_ids, cursor, total_length, past)
        tokens = torch.cat([recent_ids, input_ids[..., None]], dim=-1)
        size, width = self.contract.ahead, self.contract.feature_input
        windows = features.to(dtype_of(self.contract)).reshape(1, -1, size, width)
        with attending(state):
            predicted = self.model(tokens, windows, position_ids, HandThrough())
        logits = self.model.lm_head(predicted[:, answer_rows]).float()
        return [*self.answers(logits), predicted.float(), *presents(state)]


def falcon_contract(drafter: Falcon, target: StepContract, dtype: str) -> StepContract:
    """The contract of a drafter's graph beside its target's."""
    config = drafter.config
    contract = layer_contract(config, drafter.ids, target, dtype)
    return replace(
        contract,
        feature_input=config.feature_size,
        carried_size=config.hidden_size,
        recent=config.slots - 1,
        ahead=config.slots,
    )
