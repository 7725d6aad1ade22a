"""The two passes of an encoder-decoder as torch modules: encoder, and decoder step.

The seams of any family of transformers are: the attention, the cache with the source's
keys and values, a module `embed_positions` that looks positions up in a table, and T5's
bias by the distance of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from jetdraft.checkpoints.source_attention import CrossCache, Pairs, SourceState
from jetdraft.contracts.constants import HIDDEN
from jetdraft.contracts.source_contract import SourceContract
from jetdraft.contracts.step_contract import StepContract
from jetdraft.errors import UnsupportedModelError
from jetdraft.export.step import Specs, Step, dtype_of, state_of, zeros

_TRACED_SOURCE = 9
"""Tokens of the source that the tracer sees."""


def cross_attentions(model: Any) -> list[Any]:
    """The decoder's modules that attend to the source, by layer."""
    return [
        module
        for module in model.get_decoder().modules()
        if getattr(module, "is_causal", None) is False
        and getattr(module, "is_decoder", False)
    ]


def source_sizes(model: Any) -> tuple[int, int]:
    """The mel bins of a model that hears, and its slots; zeros for other models."""
    bins = int(getattr(model.config, "num_mel_bins", 0))
    table = getattr(model.get_encoder(), "embed_positions", None)
    return bins, table.weight.shape[0] if bins and table is not None else 0


def projections(module: Any) -> tuple[Any, Any]:
    """The linear layers that make a cross attention's keys and values."""
    if hasattr(module, "k_proj"):
        return module.k_proj, module.v_proj
    return module.k, module.v


def relative_table(model: Any) -> Any:
    """The decoder's attention with a table of biases by distance; None without it."""
    modules = model.get_decoder().modules()
    named = "has_relative_attention_bias"
    return next((m for m in modules if getattr(m, named, False)), None)


def encoder_parameters(model: Any) -> set[int]:
    """The ids of the weights that only the encoder's graph reads."""
    layers = [layer for m in cross_attentions(model) for layer in projections(m)]
    parts = [model.get_encoder(), *layers]
    own = {id(weight) for part in parts for weight in part.parameters()}
    shared = {id(weight) for weight in model.get_input_embeddings().parameters()}
    return own - shared


class SourceStep(Step):
    """One pass of a decoder that reads a source, as its contract declares it.

    SourceStep(model, contract)(ids, positions, cursor, total, answers, length, ...)
    """

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Only the weights that the decoder reads."""
        hidden = encoder_parameters(self.model)
        for name, weight in super().named_parameters(*args, **kwargs):
            if id(weight) not in hidden:
                yield name, weight

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cursor: Tensor,
        total_length: Tensor,
        answer_rows: Tensor,
        source_length: Tensor,
        *rest: Any,
    ) -> list[Tensor]:
        """The outputs of the contract; `rest` is the cross buffers, then the past."""
        *cross, past = rest
        plain = state_of(position_ids, cursor, total_length, past)
        slots = torch.arange(self.contract.source_slots)
        dtype = dtype_of(self.contract)
        beyond = (slots >= source_length).to(dtype) * HIDDEN
        state = SourceState(
            plain.cursor,
            plain.last_row,
            plain.total_length,
            plain.past,
            bias=self._bias(position_ids, cursor),
            source_bias=beyond[None, None, None],
        )
        self._cross: Pairs = list(zip(cross[::2], cross[1::2], strict=True))
        return self.outputs(state, input_ids, position_ids, answer_rows)

    def logits(
        self, state: Any, input_ids: Tensor, position_ids: Tensor, answer_rows: Tensor
    ) -> Tensor:
        """The logits of the rows to answer for, float32 [1, m, n]."""
        dtype = dtype_of(self.contract)
        # Never read, since the cross buffers are written already.
        width = self.model.get_input_embeddings().weight.shape[1]
        states = torch.zeros(1, 1, width, dtype=dtype)
        with self._placed(position_ids), self._answering(answer_rows):
            logits: Tensor = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                decoder_input_ids=input_ids,
                past_key_values=CrossCache(self._cross),
                use_cache=True,
            ).logits
        return logits.float()

    @contextlib.contextmanager
    def _placed(self, position_ids: Tensor) -> Iterator[None]:
        """Let the decoder look up the rows' own positions."""
        table = getattr(self.model.get_decoder(), "embed_positions", None)
        if table is None:
            if not self.contract.relative_positions:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} has positions of its own kind; "
                    "export another architecture"
                )
            yield
            return
        places = position_ids + getattr(table, "offset", 0)
        table.forward = lambda *_, **__: torch.nn.functional.embedding(
            places, table.weight
        )
        try:
            yield
        finally:
            del table.forward

    @contextlib.contextmanager
    def _answering(self, answer_rows: Tensor) -> Iterator[None]:
        """Let the LM head see the rows to answer for only."""

        def keep(module: Any, args: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[:, answer_rows]
            return output

        handle = self.model.get_decoder().register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def _bias(self, position_ids: Tensor, cursor: Tensor) -> Tensor | None:
        """The bias of all slots by their distance, [1, heads, n, slots].

        A slot before the cursor has its own number as position, a row of this pass the
        row's: rows of a tree share positions.
        """
        module = relative_table(self.model)
        if module is None:
            return None
        slots = torch.arange(self.contract.slots)
        place = (slots - cursor).clamp(min=0)
        # A comparison with the number of rows, as a clip to it, would fix that number.
        place = torch.minimum(place, torch.ones_like(position_ids).sum() - 1)
        own = position_ids[0].gather(0, place)
        positions = torch.where(slots < cursor, slots, own)
        buckets = module._relative_position_bucket(
            positions[None] - position_ids[0][:, None],
            bidirectional=False,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        bias: Tensor = module.relative_attention_bias(buckets)
        return bias.permute(2, 0, 1)[None]


class EncoderStep(Step):
    """The encoder, and the decoder's projections of what it gives.

    EncoderStep(model, contract)(ids, [])    # cross_key.0, cross_value.0, ...
    """

    def __init__(self, model: Any, contract: StepContract) -> None:
        super().__init__(model, contract)
        self.source = SourceContract(contract)

    @property
    def declared(self) -> tuple[Specs, Specs, Specs]:
        """Inputs: a source. No buffers. Outputs: the cross buffers."""
        return self.source.inputs, (), self.source.outputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Only the weights that the encoder reads."""
        own = encoder_parameters(self.model)
        own |= {id(w) for w in self.model.get_encoder().parameters()}
        for name, weight in super().named_parameters(*args, **kwargs):
            if id(weight) in own:
                yield name, weight

    def example(self) -> list[Tensor]:
        """A source to trace with."""
        if self.contract.source_bins:
            return [zeros(spec) for spec in self.source.inputs]
        return [torch.zeros(1, _TRACED_SOURCE, dtype=torch.long)]

    def forward(  # type: ignore[override]
        self, source: Tensor, past: list[Tensor]
    ) -> list[Tensor]:
        """The cross buffers of a source, in the contract's order."""
        if self.contract.source_bins:
            source = source.to(dtype_of(self.contract))
        states = self.model.get_encoder()(source).last_hidden_state
        sides = [side for m in cross_attentions(self.model) for side in projections(m)]
        place = _split if self.contract.source_bins else _padded
        return [
            place(side(states), spec.shape)
            for side, spec in zip(sides, self.source.outputs, strict=True)
        ]


def _split(rows: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """Rows [1, slots, heads * d], which fill a buffer of that shape."""
    _, heads, slots, size = shape
    return rows.view(1, slots, heads, size).transpose(1, 2)


def _padded(rows: Tensor, shape: tuple[Any, ...]) -> Tensor:
    """Rows [1, source, heads * d] as a buffer of that shape, zeros behind them."""
    _, heads, slots, size = shape
    split = rows.view(1, -1, heads, size).transpose(1, 2)
    # Computed, since zeros alone would be a constant as large as the buffer.
    empty = (split[:, :, :1] * 0).expand(1, heads, slots, size)
    return torch.cat([split, empty], 2)[:, :, :slots]
