"""Checks that an encoder-decoder computes the same through the seams as on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.source_attention import IMPLEMENTATION, implement
from jetdraft.contracts.constants import FRAMES_PER_SLOT
from jetdraft.contracts.source_contract import SourceContract
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.seams import TOLERANCE, gap_of, two_passes
from jetdraft.export.source.source_step import EncoderStep, SourceStep, source_sizes
from jetdraft.export.step import dtype_of, refusal

_TOKENS = 24


def source_shapes(model: Any) -> tuple[tuple[int, int], ...]:
    """(heads, head_dim) of each layer of the decoder, from the tensors of a pass."""
    row = torch.zeros(1, 1, dtype=torch.long)
    bins, slots = source_sizes(model)
    source = torch.zeros(1, bins, FRAMES_PER_SLOT * slots) if bins else row
    implement(model, "eager")
    try:
        with torch.no_grad():
            output = model(source, decoder_input_ids=row, use_cache=True)
        caches = output.past_key_values
        own, cross = caches.self_attention_cache, caches.cross_attention_cache
        shapes = tuple((x.keys.shape[1], x.keys.shape[3]) for x in own.layers)
        across = tuple((x.keys.shape[1], x.keys.shape[3]) for x in cross.layers)
    except Exception as error:  # an unknown architecture may raise anything
        raise refusal(model, error) from error
    finally:
        implement(model, IMPLEMENTATION)
    if shapes != across:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends to the source with other heads than to "
            "its own text; see docs/models.md"
        )
    return shapes


def check_source_seams(model: Any, contract: StepContract) -> None:
    """Raise `UnsupportedModelError` unless both ways give the same logits."""
    generator = torch.Generator().manual_seed(0)
    count = min(_TOKENS, contract.capacity, contract.source_slots)
    source, ids = torch.randint(contract.vocab_size, (2, 1, count), generator=generator)
    if contract.source_bins:
        [spec] = SourceContract(contract).inputs
        source = torch.randn(spec.sized(), generator=generator)
    try:
        with torch.no_grad():
            seam_logits = _through_seams(model, contract, source, ids)
            implement(model, "eager")
            own_logits = model(source, decoder_input_ids=ids).logits.float()
            _check_last_positions(model, contract)
    except Exception as error:  # an unknown architecture may raise anything
        raise refusal(model, error) from error
    finally:
        implement(model, IMPLEMENTATION)
    gap = gap_of(seam_logits, own_logits)
    if not gap <= TOLERANCE[dtype_of(contract)]:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something that does not reach the seams "
            f"(its logits differ by {gap:.0%}); see docs/models.md"
        )


def _through_seams(
    model: Any, contract: StepContract, source: Tensor, ids: Tensor
) -> Tensor:
    """Logits of two passes over the fixed buffers, after the encoder's."""
    cross = EncoderStep(model, contract)(source, [])
    step, logits = SourceStep(model, contract), []
    past = [
        torch.zeros(spec.sized(), dtype=dtype_of(contract))
        for spec in contract.buffers("past")
    ]
    filled = contract.source_slots if contract.source_bins else source.shape[1]
    length = torch.tensor([filled], dtype=torch.int32)
    for inputs in two_passes(ids):
        outputs = step(*inputs, length, *cross, past)
        logits.append(outputs[3])
        past = outputs[-len(past) :]
    return torch.cat(logits, 1)


def most_positions(model: Any) -> int | None:
    """The rows of the smaller table of positions; None without such tables.

    The table of an encoder that hears counts frames, not tokens.
    """
    halves = [model.get_decoder()]
    if not source_sizes(model)[0]:
        halves.append(model.get_encoder())
    tables = [getattr(half, "embed_positions", None) for half in halves]
    sizes = [t.weight.shape[0] - getattr(t, "offset", 0) for t in tables if t]
    return min(sizes, default=None)


def _check_last_positions(model: Any, contract: StepContract) -> None:
    """Refuse tables of positions that end before the buffers."""
    limit = most_positions(model)
    if limit is not None and contract.capacity > limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {limit} positions; export with --capacity "
            f"{limit} or less"
        )
