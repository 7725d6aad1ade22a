"""One pass of a Chimera drafter as a torch module, traced like a decoder's pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.attention import attend, attending
from jetdraft.checkpoints.heads.attached.chimera import GRAM, Chimera
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.heads.layer_contract import layer_contract
from jetdraft.export.step import Step, dtype_of, presents, state_of


class ChimeraStep(Step):
    """One pass over rows, the tokens before them and features; see `Step`.

    trace(ChimeraStep(drafter, contract), checkpoint.names())
    """

    def __init__(self, drafter: Chimera, contract: StepContract) -> None:
        super().__init__(drafter, contract, ids=drafter.ids)

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
        trigrams = torch.cat([recent_ids, input_ids[..., None]], dim=-1)
        features = features.to(dtype_of(self.contract))
        with attending(state):
            hidden, carried = self.model(
                trigrams, features, position_ids, over_the_buffers
            )
        logits = self.model.lm_head(hidden[:, answer_rows]).float()
        return [*self.answers(logits), carried.float(), *presents(state)]


def over_the_buffers(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over the buffers of the pass; see `Attention`."""
    return attend(module, query, key, value, None, module.scaling)[0]


def chimera_contract(
    drafter: Chimera, target: StepContract, dtype: str
) -> StepContract:
    """The contract of a drafter's graph beside its target's."""
    config = drafter.config
    contract = layer_contract(config, drafter.ids, target, dtype)
    return replace(
        contract,
        feature_input=config.feature_size,
        carried_size=config.hidden_size,
        recent=GRAM - 1,
    )
