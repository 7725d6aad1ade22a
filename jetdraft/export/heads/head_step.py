"""One pass of a head as a torch module, to be traced like a pass of a decoder."""

from __future__ import annotations

from dataclasses import replace

import torch

from jetdraft.checkpoints.attention import IMPLEMENTATION, HandThrough, attending
from jetdraft.checkpoints.heads.head import Head
from jetdraft.contracts.step_contract import StepContract
from jetdraft.export.step import Step, dtype_of, one_row, presents, state_of


class HeadStep(Step):
    """One pass of a head over fixed buffers, as its contract declares it; see `Step`.

    Its candidates are ids of the target, also where it chooses among a part of the
    vocabulary.

        trace(HeadStep(head, contract), checkpoint.names())
    """

    def __init__(self, head: Head, contract: StepContract) -> None:
        super().__init__(head, contract, ids=head.ids)
        head.attend_with(IMPLEMENTATION)

    def forward(  # type: ignore[override]  # a head has features as an input
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
        features = features.to(dtype_of(self.contract))
        with attending(state):
            hidden, carried = self.model(
                input_ids, features, position_ids, HandThrough()
            )
        logits = self.model.lm_head(hidden[:, answer_rows]).float()
        return [*self.answers(logits), carried.float(), *presents(state)]


def head_contract(head: Head, target: StepContract, dtype: str) -> StepContract:
    """The contract of a head's graph beside its target's.

    Raises `UnsupportedModelError` for a head whose layers cannot be exported.
    """
    size = head.config.feature_size
    head.attend_with(IMPLEMENTATION)
    row = torch.zeros(1, 1, dtype=torch.long)
    state = one_row(
        head,
        lambda cache: head(
            row, torch.zeros(1, 1, size, dtype=getattr(torch, dtype)), row, cache
        ),
    )
    return replace(
        target,
        dtype=dtype,
        kv_shapes=tuple((key.shape[1], key.shape[3]) for key, _ in state.past),
        hidden_size=0,
        kv_bits=0,
        feature_size=0,
        feature_input=size,
        carried_size=size,
        draft_vocab=0 if head.ids is None else len(head.ids),
        spare_slots=0,
    )
