"""One pass of Medusa heads as a torch module, to be traced like a pass of a decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from jetdraft.checkpoints.heads.medusa import Medusa
from jetdraft.contract import StepContract
from jetdraft.export.step import Step, answers, dtype_of


class MedusaStep(Step):
    """The guesses of all heads for the last answered row, as the contract declares.

    trace(MedusaStep(medusa, contract), checkpoint.names())
    """

    def forward(  # type: ignore[override]  # heads have features as an input
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        features: torch.Tensor,
        past: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The outputs in the order of `StepContract.outputs`; there are no buffers."""
        last = features[:, answer_rows][:, -1:].to(dtype_of(self.contract))
        logits = self.model.logits(self.model(last))[:, 0].float()
        return answers(logits, self.contract)


def medusa_contract(medusa: Medusa, target: StepContract, dtype: str) -> StepContract:
    """The contract of the heads' graph beside their target's."""
    return replace(
        target,
        dtype=dtype,
        kv_shapes=(),
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        feature_input=medusa.config.feature_size,
        guesses=medusa.config.slots,
        spare_slots=0,
    )
