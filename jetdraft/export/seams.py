"""Checks that a model computes the same through jetdraft's attention and cache."""

import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jetdraft.bundle import TARGET
from jetdraft.checkpoints import attention
from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import FRAMES_PER_SLOT, WIDEST
from jetdraft.errors import CheckpointError, UnsupportedModelError
from jetdraft.export.export_options import ExportOptions
from jetdraft.export.source_step import EncoderStep, SourceStep, source_sizes
from jetdraft.export.step import Step, dtype_of, exporting, zeros
from jetdraft.quant.divergence import own_attention
from jetdraft.recipe import RUNGS, Recipe

_FEWEST_TOKENS = 24
_MAX_TOKENS = 512
# The largest difference relative to the largest logit; a lost mask has 1000 times it.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2}


def trained_length(model: Any) -> int | None:
    """The text length, in tokens, that plain RoPE was trained on; None for others."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return None
    by_layer = isinstance(next(iter(rope.values())), dict)
    kinds = rope.values() if by_layer else [rope]
    if any(kind.get("rope_type", "default") != "default" for kind in kinds):
        return None
    return getattr(config, "max_position_embeddings", None) or None


def warn_of_length(model: Any, capacity: int) -> None:
    """Warn of buffers that are longer than the texts that a model was trained on."""
    trained = trained_length(model)
    if trained is not None and capacity > trained:
        warnings.warn(
            f"{type(model).__name__} was trained on texts of {trained} tokens, and the "
            f"buffers hold {capacity}, where it may write nonsense; export with "
            f"--capacity {trained} or less",
            stacklevel=2,
        )


def check_seams(model: Any, contract: StepContract) -> None:
    """Raise `UnsupportedModelError` unless jetdraft's pass gives the model's logits."""
    config = model.config.get_text_config(decoder=True)
    names = ("sliding_window", "attention_chunk_size")
    sizes = [getattr(config, name, None) for name in names]
    window = min((size for size in sizes if size), default=0)
    tokens = min(max(_FEWEST_TOKENS, 2 * window), _MAX_TOKENS, contract.capacity)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(contract.vocab_size, (1, tokens), generator=generator)
    step = Step(model, replace(contract, capacity=tokens, spare_slots=0))
    with exporting(model), torch.no_grad():
        seam_logits, windows = _two_passes(step, ids)
        with own_attention(model, attention.set_attention):
            own_logits = model(input_ids=ids, use_cache=False).logits.float()
    # These tokens are too few to notice a window that the model does not pass on.
    too_wide = window > tokens // 2 and window < contract.capacity and not any(windows)
    fact = "attends in a way that does not reach AttentionInterface"
    _check_gap(model, contract, (seam_logits, own_logits), fact, too_wide)
    _check_last_position(model, contract)


def _check_gap(
    model: Any, of: StepContract, both: tuple[Tensor, Tensor], fact: str, wrong: bool
) -> None:
    """Raise `UnsupportedModelError` if logits differ by too much of the largest.

    Raises `CheckpointError` if they are not finite.
    """
    seam, own = both
    if not own.isfinite().all():
        fact = "gives logits that are not finite, as with a weight that is NaN"
        fix = "fetch the checkpoint again, or export with --dtype fp32"
        raise CheckpointError(f"{type(model).__name__} {fact}; {fix}")
    gap = float((seam - own).abs().max() / own.abs().max().clamp(min=1e-6))
    if wrong or not gap <= TOLERANCE[dtype_of(of)]:
        fact += f" (its logits differ by {gap:.0%})"
        raise UnsupportedModelError.of(model, fact)


def _two_passes(step: Step, ids: Tensor, *others: Tensor) -> tuple[Tensor, set[int]]:
    """Return logits of `ids` [1, n], read in two passes, and the layers' windows."""
    count, states = ids.shape[1], step.contract.states
    past = [zeros(spec) for spec in step.declared_tensors[1]]
    logits, windows, kept = [], set(), 0
    for start, end in pairwise((0, *((2 * count // 3,) if past else ()), count)):
        outputs = step(
            ids[:, start:end],
            torch.arange(start, end)[None],
            torch.tensor([start], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            torch.arange(end - start),
            *others,
            *([torch.tensor([kept, end - start])] if states else ()),
            past,
        )
        logits.append(outputs[3])
        past = outputs[-len(past) :]
        kept = end - start if end - start <= WIDEST else 0
        windows |= {*step.windows.values()}
    return torch.cat(logits, 1), windows


def _check_last_position(model: Any, contract: StepContract) -> None:
    one = torch.ones(1, dtype=torch.int32)
    shapes, dtype = contract.kv_shapes, dtype_of(contract)
    past = [(torch.zeros(1, n, 1, size, dtype=dtype),) * 2 for n, size in shapes]
    state = attention.StepState(one - 1, one - 1, one, past)
    last = torch.full((1, 1), contract.capacity - 1)
    cache = attention.PassThroughCache()
    try:
        with attention.attending(state), torch.no_grad():
            model(last * 0, position_ids=last, past_key_values=cache, use_cache=True)
    except IndexError as error:
        limit = model.config.get_text_config(decoder=True).max_position_embeddings
        raise _capacity_error(model, limit) from error


def _capacity_error(model: Any, limit: int) -> UnsupportedModelError:
    fix = f"export with --capacity {limit} or less"
    return UnsupportedModelError.of(model, f"has {limit} positions", fix)


_SOURCE_TOKENS = 24  # The most tokens of source and text that are compared.


def source_kv_shapes(model: Any) -> tuple[tuple[int, int], ...]:
    """Return (heads, head_dim) of each decoder layer, measured in a pass."""
    row = torch.zeros(1, 1, dtype=torch.long)
    bins, slots = source_sizes(model)
    source = torch.zeros(1, bins, FRAMES_PER_SLOT * slots) if bins else row
    attending = own_attention(model, attention.set_attention)
    with exporting(model), attending, torch.no_grad():
        caches = model(source, decoder_input_ids=row, use_cache=True).past_key_values
        both = caches.self_attention_cache, caches.cross_attention_cache
        keys = ([layer.keys for layer in cache.layers] for cache in both)
        shapes, across = (tuple((x.shape[1], x.shape[3]) for x in own) for own in keys)
    if shapes != across:
        fact = "attends to the source with other heads than to its own text"
        raise UnsupportedModelError.of(model, fact)
    return shapes


def check_source_seams(model: Any, contract: StepContract) -> None:
    """Check an encoder-decoder and its positions as `check_seams` checks a decoder."""
    generator = torch.Generator().manual_seed(0)
    count = min(_SOURCE_TOKENS, contract.capacity, contract.source_slots)
    source, ids = torch.randint(contract.vocab_size, (2, 1, count), generator=generator)
    if contract.source_bins:
        source = torch.randn(contract.encoder_input.shape_for(), generator=generator)
    with exporting(model), torch.no_grad():
        cross = EncoderStep(model, contract)(source, [])
        filled = contract.source_slots if contract.source_bins else count
        length = torch.tensor([filled], dtype=torch.int32)
        step = SourceStep(model, contract)
        seam_logits, _ = _two_passes(step, ids, length, *cross)
        with own_attention(model, attention.set_attention):
            own_logits = model(source, decoder_input_ids=ids).logits.float()
        limit = position_limit(model)
        if limit is not None and contract.capacity > limit:
            raise _capacity_error(model, limit)
    fact = "computes something that does not reach the seams"
    _check_gap(model, contract, (seam_logits, own_logits), fact, False)


def position_limit(model: Any) -> int | None:
    """The rows of the shortest position table of both halves; None without tables."""
    halves = [model.get_decoder()]
    if not source_sizes(model)[0]:  # an encoder that hears counts frames
        halves.append(model.get_encoder())
    tables = [getattr(half, "embed_positions", None) for half in halves]
    sizes = [t.weight.shape[0] - getattr(t, "offset", 0) for t in tables if t]
    return min(sizes, default=None)


def settle_source(checkpoint: Checkpoint, options: ExportOptions) -> ExportOptions:
    """Return the options with the defaults of an encoder-decoder, or of embeddings."""
    if not (checkpoint.reads_source or checkpoint.embedding):
        return options
    safe = Recipe.parse(RUNGS[options.kernel_of(TARGET)][-1])
    recipe, slots = options.recipe or safe, options.capacity
    if checkpoint.speech is not None:
        slots = min(slots, position_limit(checkpoint.model) or slots)
    whole = attention.attends_both_ways(checkpoint.model.config)
    width = slots if whole else min(options.max_width, slots)
    return replace(options, recipe=recipe, fast=True, capacity=slots, max_width=width)
