"""Checks that a model computes the same through jetdraft's two seams as on its own.

The seams are the attention and the cache, see `checkpoints.attention`. transformers
builds no mask for an attention that it does not know. So what a model expresses through
masks alone (chunks, windows that it does not pass on, both directions) would be lost
without an error. To run the model both ways finds that, and anything else that a new
architecture does outside the seams.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jetdraft.checkpoints.attention import (
    IMPLEMENTATION,
    HandThrough,
    StepState,
    attending,
)
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.source_attention import (
    IMPLEMENTATION as SOURCE_IMPLEMENTATION,
)
from jetdraft.checkpoints.source_attention import implement
from jetdraft.contracts.constants import FRAMES_PER_SLOT
from jetdraft.contracts.split_contract import SourceContract
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.source_step import EncoderStep, SourceStep, source_sizes
from jetdraft.export.step import Step, dtype_of, refusal
from jetdraft.quant.choice import TOP
from jetdraft.recipe import Recipe

_LEAST_TOKENS = 24
_MOST_TOKENS = 512
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2}
"""The largest difference, relative to the largest logit; a lost mask makes a difference
a thousand times as large."""


def trained_length(model: Any) -> int | None:
    """The tokens of the texts that a model was trained on; None if they set no limit.

    A model without positions has no limit. Scaled frequencies were made for the length
    that the config states, and their model may be used beyond it.
    """
    config = model.config.get_text_config(decoder=True)
    if not _is_unscaled(getattr(config, "rope_parameters", None)):
        return None
    return getattr(config, "max_position_embeddings", None) or None


def warn_of_length(model: Any, capacity: int) -> None:
    """Warn of buffers that are longer than the texts that a model was trained on."""
    trained = trained_length(model)
    if trained is not None and capacity > trained:
        warnings.warn(
            f"{type(model).__name__} was trained on texts of {trained} tokens, and the "
            f"buffers hold {capacity}, where it may write nonsense; export with "
            f"--capacity {trained} or less, or with --select-kv N and generate with "
            "--drafting select-kv=true",
            stacklevel=2,
        )


def _is_unscaled(rope: Any) -> bool:
    """Whether positions turn by the frequencies of the training, in all layers."""
    if not rope:
        return False
    kinds = rope.values() if isinstance(next(iter(rope.values())), dict) else [rope]
    return all(kind.get("rope_type", "default") == "default" for kind in kinds)


def check_seams(model: Any, contract: StepContract) -> None:
    """Raise `UnsupportedModelError` unless both ways give the same logits."""
    window = _narrowest_window(model)
    tokens = min(max(_LEAST_TOKENS, 2 * window), _MOST_TOKENS, contract.capacity)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(contract.vocab_size, (1, tokens), generator=generator)
    try:
        with torch.no_grad():
            seam_logits, windows = _through_seams(model, contract, ids)
            model.set_attn_implementation("eager")
            own_logits = model(input_ids=ids, use_cache=False).logits.float()
    except Exception as error:  # an unknown architecture may raise anything
        raise refusal(model, error) from error
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    gap = gap_of(seam_logits, own_logits)
    # These tokens are too few to notice a window that the model does not pass on.
    too_wide = window > tokens // 2 and window < contract.capacity and not any(windows)
    if not gap <= TOLERANCE[dtype_of(contract)] or too_wide:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends in a way that does not reach "
            f"AttentionInterface (its logits differ by {gap:.0%}); see "
            "docs/models.md"
        )
    _check_last_position(model, contract)


def gap_of(seam_logits: Tensor, own_logits: Tensor) -> float:
    """The largest difference, relative to the largest of the model's own logits."""
    largest = own_logits.abs().max().clamp(min=1e-6)
    return float((seam_logits - own_logits).abs().max() / largest)


def two_passes(ids: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The first inputs of two passes that read `ids` [1, n]: two thirds, then the rest.

    They are the rows' ids and positions, cursor, total length, and the answer rows.
    """
    count = ids.shape[1]
    for start, end in ((0, 2 * count // 3), (2 * count // 3, count)):
        yield (
            ids[:, start:end],
            torch.arange(start, end)[None],
            torch.tensor([start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            torch.arange(end - start),
        )


def _narrowest_window(model: Any) -> int:
    """The window or chunk that the config names, 0 if none."""
    config = model.config.get_text_config(decoder=True)
    names = ("sliding_window", "attention_chunk_size")
    sizes = [getattr(config, name, None) for name in names]
    return min((size for size in sizes if size), default=0)


def _through_seams(
    model: Any, contract: StepContract, ids: Tensor
) -> tuple[Tensor, set[int]]:
    """Logits of two passes over the fixed buffers, and the windows of its layers."""
    step = Step(model, contract)
    dtype = dtype_of(contract)
    past = [
        torch.zeros(1, heads, ids.shape[1], size, dtype=dtype)
        for heads, size in contract.kv_shapes
        for _ in ("key", "value")
    ]
    logits, windows = [], set()
    for inputs in two_passes(ids):
        outputs = step(*inputs, past)
        logits.append(outputs[3])
        past = outputs[-len(past) :]
        windows |= step.windows
    return torch.cat(logits, 1), windows


def _check_last_position(model: Any, contract: StepContract) -> None:
    """Refuse a learned table of positions that ends before the buffers."""
    one = torch.ones(1, dtype=torch.int32)
    past = [
        (torch.zeros(1, heads, 1, size, dtype=dtype_of(contract)),) * 2
        for heads, size in contract.kv_shapes
    ]
    state = StepState(cursor=one - 1, last_row=one - 1, total_length=one, past=past)
    try:
        with attending(state), torch.no_grad():
            model(
                input_ids=torch.zeros(1, 1, dtype=torch.long),
                position_ids=torch.full((1, 1), contract.capacity - 1),
                past_key_values=HandThrough(),
                use_cache=True,
            )
    except IndexError as error:
        limit = model.config.get_text_config(decoder=True).max_position_embeddings
        raise UnsupportedModelError(
            f"{type(model).__name__} has {limit} positions; export with "
            f"--capacity {limit} or less"
        ) from error


# --- encoder-decoders -----------------------------------------------------------------


_SOURCE_TOKENS = 24


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
        implement(model, SOURCE_IMPLEMENTATION)
    if shapes != across:
        raise UnsupportedModelError(
            f"{type(model).__name__} attends to the source with other heads than to "
            "its own text; see docs/models.md"
        )
    return shapes


def check_source_seams(model: Any, contract: StepContract) -> None:
    """Raise `UnsupportedModelError` unless both ways give the same logits."""
    generator = torch.Generator().manual_seed(0)
    count = min(_SOURCE_TOKENS, contract.capacity, contract.source_slots)
    source, ids = torch.randint(contract.vocab_size, (2, 1, count), generator=generator)
    if contract.source_bins:
        [spec] = SourceContract(contract).inputs
        source = torch.randn(spec.sized(), generator=generator)
    try:
        with torch.no_grad():
            seam_logits = _source_through_seams(model, contract, source, ids)
            implement(model, "eager")
            own_logits = model(source, decoder_input_ids=ids).logits.float()
            _check_last_positions(model, contract)
    except Exception as error:  # an unknown architecture may raise anything
        raise refusal(model, error) from error
    finally:
        implement(model, SOURCE_IMPLEMENTATION)
    gap = gap_of(seam_logits, own_logits)
    if not gap <= TOLERANCE[dtype_of(contract)]:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes something that does not reach the seams "
            f"(its logits differ by {gap:.0%}); see docs/models.md"
        )


def _source_through_seams(
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


def settled_options(checkpoint: Checkpoint, options: ExportOptions) -> ExportOptions:
    """The options of an export; for an encoder-decoder, with the safe recipe.

    No text of an encoder-decoder is written to measure others on.

    A model that hears gets no more rows than it has positions: the text of a window is
    never longer.
    """
    if not checkpoint.reads_source:
        return options
    recipe, capacity = options.recipe or Recipe.parse(TOP), options.capacity
    if checkpoint.speech is not None:
        capacity = min(capacity, most_positions(checkpoint.model) or capacity)
    width = min(options.max_width, capacity)
    return replace(
        options, recipe=recipe, fast=True, capacity=capacity, max_width=width
    )
