"""Lets the rows of the chain graph carry probes: speculative streams (2402.11131)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetdraft.bundle import STREAMS, TARGET
from jetdraft.checkpoints.attention import HandThrough, attending
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.streamed import LOSSLESS, SHARED, Streamed, stream_weights
from jetdraft.contract import HIDDEN, PARENTS, SCORES, StepContract
from jetdraft.errors import OptionError, PairError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.job import Job
from jetdraft.export.step import CUT, Step, answers, count, dtype_of, presents, state_of
from jetdraft.export.variants.variant import Variant


class StreamStep(Step):
    """One pass of a model whose rows can carry streams; see `Step`.

    It also gives the hidden states where the streams enter, at which the target can be
    cut in halves, and the scores of an early exit there.
    """

    extra_inputs = (PARENTS,)
    extra_outputs = (CUT, SCORES.name)

    def __init__(self, streamed: Streamed, contract: StepContract) -> None:
        super().__init__(streamed, contract)
        self.cut = streamed.streams.settings.layers

    @property
    def decoder(self) -> Any:
        """The model without its streams."""
        return self.model.model

    def forward(  # type: ignore[override]  # the contract of streams has more inputs
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cursor: torch.Tensor,
        total_length: torch.Tensor,
        answer_rows: torch.Tensor,
        draft_mask: torch.Tensor,
        draft_start: torch.Tensor,
        probe_rows: torch.Tensor,
        probe_ids: torch.Tensor,
        past: list[torch.Tensor],
        parents: torch.Tensor,
    ) -> list[torch.Tensor]:
        """The outputs in the order of `StepContract.outputs`, then the extra outputs.

        `parents` int64 [n] are the parents of the rows in a draft; the root counts as
        its own parent.
        """
        state = state_of(position_ids, cursor, total_length, past)

        def entered() -> None:
            state.last_row = state.last_row + count(probe_rows[None])
            state.bias = _widened(draft_mask, draft_start, self.contract)

        self.model.entered = entered
        with attending(state):
            logits, early, hidden = self.model(
                input_ids,
                position_ids,
                probe_rows,
                probe_ids,
                answer_rows,
                early=slice(None),
                past_key_values=HandThrough(),
                use_cache=True,
            )
        # Split the results, not the logits: a pass may have no probes, and not every
        # operator takes empty inputs.
        all_answers = answers(logits.float(), self.contract)
        rows = answer_rows.shape[0]
        row_answers, probe_answers = (
            [_rows(x, start, end) for x in all_answers]
            for start, end in ((0, rows), (rows, None))
        )
        scores = _scores(early.float(), input_ids, parents)
        return [*row_answers, *probe_answers, *presents(state), hidden, scores]


def _widened(
    mask: torch.Tensor, start: torch.Tensor, contract: StepContract
) -> torch.Tensor:
    """The bias of all slots that a mask means, see `attentions.widened`."""
    slots = torch.arange(1, contract.slots + 1)
    lines = (slots - start.to(torch.int64)).clamp(0, contract.draft_slots)
    return (mask.to(dtype_of(contract)) * HIDDEN)[lines].T[None, None]


def _rows(answer: torch.Tensor, start: int, end: int | None) -> torch.Tensor:
    """Some rows of an answer.

    WebGPU can cut floats only; they hold all integers up to 16 million.
    """
    return answer.to(torch.float32)[:, start:end].to(answer.dtype)


def _scores(
    logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
) -> torch.Tensor:
    """The log probability of each row's token after its parent, float32 [1, n]."""
    chosen = logits[:, parents].gather(-1, tokens[..., None])[..., 0]
    return chosen - torch.logsumexp(logits, -1)[:, parents]


def check(name: str, checkpoint: Checkpoint, options: ExportOptions) -> None:
    """Refuse a drafter with streams, and an adapter scale without merged LoRA."""
    if name != TARGET:
        if checkpoint.streams:
            raise PairError(
                f"{checkpoint.source} has streams; only a target can have them"
            )
        return
    tuned = checkpoint.streams is not None and checkpoint.streams.mode == SHARED
    if options.adapter_scale != 1.0 and not tuned:
        raise OptionError(
            f"adapter scale {options.adapter_scale} needs streams of the shared mode, "
            f"since {checkpoint.source} has no LoRA to merge into its weights; leave "
            "the adapter scale out"
        )


def declare(checkpoint: Checkpoint, contract: StepContract) -> StepContract:
    """Add the number of streams that a row can carry."""
    streams = checkpoint.streams.gamma if checkpoint.streams else 0
    return replace(contract, streams=streams)


def write(job: Job) -> None:
    """Write `streams.npz`, and let the chain graph be traced with the streams."""
    if job.checkpoint.streams is None:
        return
    streamed = job.checkpoint.with_streams(job.options.adapter_scale)
    job.step = StreamStep(streamed, job.contract)
    job.task = stream_weights(streamed)
    _write_task(job.folder / STREAMS, streamed, job.contract.dtype)
    settings = streamed.streams.settings.to_json()
    job.entry = replace(job.entry, streams={**settings, "base": _base(streamed)})


def _write_task(file: Path, streamed: Streamed, dtype: str) -> None:
    """Write the weights of the streams, for `jetdraft.load(streams=)`.

    The npz file has float arrays by their names in the graph, and `base`, the hash of
    the weights that the streams belong to.
    """
    arrays: dict[str, Any] = {
        name: weight.numpy().astype(dtype)
        for name, weight in stream_weights(streamed).items()
    }
    arrays["base"] = np.array(_base(streamed))
    np.savez(file, **arrays)


def _base(streamed: Streamed) -> str:
    """The hash of the weights that the streams belong to.

    In the shared mode the merged LoRA is a part of these weights.
    """
    settings = streamed.streams.settings
    if settings.mode == LOSSLESS:
        return settings.base
    return hashlib.sha256(f"{settings.base} {streamed.tuned}".encode()).hexdigest()


VARIANT = Variant(write, check, declare)
