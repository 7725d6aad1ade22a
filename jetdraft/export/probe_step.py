"""The pass of a target whose rows carry streams (2402.11131) or prompt tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from jetdraft.checkpoints.attention import PassThroughCache, attending
from jetdraft.checkpoints.probes import ProbedModel
from jetdraft.checkpoints.prompts import PromptedModel
from jetdraft.checkpoints.streams import StreamedModel
from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.step_contract import PARENTS, SCORES, StepContract
from jetdraft.export.step import (
    CUT,
    Step,
    count_on_device,
    dtype_of,
    make_state,
    present_buffers,
)


class ProbeStep(Step):
    """One pass of a model whose rows can carry probes, which may see a prefix."""

    model: ProbedModel

    @property
    def decoder(self) -> Any:
        """The model without its probes."""
        return self.model.model

    @property
    def unquantized_weights(self) -> dict[str, Tensor]:
        """The weights of the probes, which stay floats, by name."""
        return self.model.task

    def forward(  # type: ignore[override]  # the contract of probes has more inputs
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cursor: Tensor,
        total_length: Tensor,
        answer_rows: Tensor,
        draft_mask: Tensor,
        draft_start: Tensor,
        probe_rows: Tensor,
        probe_ids: Tensor,
        *rest: Any,
    ) -> list[Tensor]:
        """Return the contract's outputs, then the extra outputs.

        `rest` holds `prefix_rows` int64 [p], only if the contract has a prefix; then
        the list of past buffers; then the extra inputs.
        """
        prefix = rest[0] if self.contract.prefix else None
        past, *extras = rest if prefix is None else rest[1:]
        state = make_state(position_ids, cursor, total_length, past)
        state.rows = input_ids.shape[1]

        def set_bias_and_prefix() -> None:
            # Counted with the rows: a pass may have no probes, and CUDA sums no axis
            # of size 0.
            filled = self.model.current_pass.positions
            if prefix is not None:
                filled = torch.cat([filled, prefix[None]], 1)
            state.last_row = cursor + count_on_device(filled) - 1
            state.bias = _mask_bias(draft_mask, draft_start, self.contract)
            if prefix is not None:
                prompts = cast(PromptedModel, self.model).prompts
                state.prefix = [
                    (keys.index_select(2, prefix), values.index_select(2, prefix))
                    for keys, values in map(prompts.prefix, range(len(state.past)))
                ]

        self.model.on_probes_added = set_bias_and_prefix
        with attending(state):
            logits, *extra_outputs = self.run_model(
                (input_ids, position_ids, probe_rows, probe_ids, answer_rows),
                *extras,
                past_key_values=PassThroughCache(),
                use_cache=True,
            )
        # Split the results, not the logits: a pass may have no probes, and not every
        # operator takes empty inputs.
        all_answers = self.answers(logits.float())
        rows = answer_rows.shape[0]
        row_answers, probe_answers = (
            [_slice_rows(x, start, end) for x in all_answers]
            for start, end in ((0, rows), (rows, None))
        )
        return [*row_answers, *probe_answers, *present_buffers(state), *extra_outputs]

    def run_model(
        self, rows_and_probes: tuple[Tensor, ...], **options: Any
    ) -> list[Tensor]:
        """Run the model; return the logits, to which a subclass adds extra outputs."""
        return [self.model(*rows_and_probes, **options)]


class StreamStep(ProbeStep):
    """One pass with streams; it also outputs states and scores for an early exit."""

    extra_inputs = (PARENTS,)
    extra_outputs = (CUT, SCORES.name)

    def __init__(self, streamed: StreamedModel, contract: StepContract) -> None:
        super().__init__(streamed, contract)
        self.cut = streamed.settings.layers

    def run_model(  # type: ignore[override]  # its graph has one more input
        self, rows_and_probes: tuple[Tensor, ...], parents: Tensor, **extra: Any
    ) -> list[Tensor]:
        """Return logits, states at the cut, and scores of rows with these parents."""
        logits, early, hidden = self.model(*rows_and_probes, early=slice(None), **extra)
        scores = _early_exit_scores(early.float(), rows_and_probes[0], parents)
        return [logits, hidden, scores]


def _mask_bias(mask: Tensor, start: Tensor, contract: StepContract) -> Tensor:
    """Return the bias [1, 1, n, slots] of a mask, see `attentions.add_mask`."""
    slots = torch.arange(1, contract.slots + 1)
    lines = (slots - start.to(torch.int64)).clamp(0, contract.draft_slots)
    return (mask.to(dtype_of(contract)) * HIDDEN)[lines].T[None, None]


def _slice_rows(answer: Tensor, start: int, end: int | None) -> Tensor:
    """Slice rows of an answer [1, m, ...], as floats: WebGPU slices no integers."""
    return answer.to(torch.float32)[:, start:end].to(answer.dtype)


def _early_exit_scores(logits: Tensor, tokens: Tensor, parents: Tensor) -> Tensor:
    """Return each row's log probability after its parent, float32 [1, n]."""
    chosen = logits[:, parents].gather(-1, tokens[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)[:, parents]


def write_probe_weights(file: Path, probed: ProbedModel, dtype: str) -> None:
    """Write an npz of the probes' weights, by names in the graph, and hash `base`."""
    arrays: dict[str, Any] = {
        name: weight.detach().numpy().astype(dtype)
        for name, weight in probed.task.items()
    }
    arrays["base"] = np.array(probed.base)
    np.savez(file, **arrays)
