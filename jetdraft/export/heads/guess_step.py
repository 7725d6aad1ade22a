"""One pass of heads that guess as a torch module, traced like a pass of a decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from jetdraft.checkpoints.heads.hydra import Hydra
from jetdraft.checkpoints.heads.medusa import Medusa
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.step import Step, dtype_of

Guessing = Medusa | Hydra


class GuessStep(Step):
    """The guesses of all heads after the last answered row, as the contract declares.

    trace(GuessStep(medusa, contract), checkpoint.names())
    """

    def __init__(self, heads: Guessing, contract: StepContract) -> None:
        super().__init__(heads, contract, ids=heads.ids)

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
        tokens = input_ids[:, answer_rows][:, -1:]
        logits = self.model.guesses(last, tokens)[:, 0].float()
        return self.answers(logits)


def guess_contract(heads: Guessing, target: StepContract, dtype: str) -> StepContract:
    """The contract of the heads' graph beside their target's."""
    return replace(
        target,
        dtype=dtype,
        kv_shapes=(),
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        feature_input=heads.config.feature_size,
        draft_vocab=0 if heads.ids is None else len(heads.ids),
        guesses=heads.config.slots,
        spare_slots=0,
    )
