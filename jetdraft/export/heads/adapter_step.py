"""One pass of an adapter as a torch module, to be traced like a pass of a decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from jetdraft.checkpoints.attention import IMPLEMENTATION, HandThrough, attending
from jetdraft.checkpoints.heads.attached.exit_adapter import ExitAdapter
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.heads.layer_contract import layer_contract
from jetdraft.export.step import Step, dtype_of, presents, state_of


class AdapterStep(Step):
    """One pass over the states of rows, as the contract declares it; see `Step`.

    trace(AdapterStep(adapter, contract), checkpoint.names())
    """

    def __init__(self, adapter: ExitAdapter, contract: StepContract) -> None:
        super().__init__(adapter, contract, ids=adapter.ids)
        adapter.attend_with(IMPLEMENTATION)

    def forward(  # type: ignore[override]  # an adapter has features as an input
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        features: torch.Tensor,
        past: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The outputs in the order of `StepContract.outputs`."""
        state = state_of(position_ids, cursor, total_length, past)
        states = features.to(dtype_of(self.contract))
        with attending(state):
            hidden = self.model(states, position_ids, HandThrough())
        logits = self.model.lm_head(hidden[:, answer_rows]).float()
        return [*self.answers(logits), *presents(state)]


def adapter_contract(
    adapter: ExitAdapter, target: StepContract, dtype: str
) -> StepContract:
    """The contract of an adapter's graph beside its target's."""
    config = adapter.config
    contract = layer_contract(config, adapter.ids, target, dtype)
    return replace(contract, feature_input=config.feature_size)
