"""The two passes of an encoder-decoder as torch modules: encoder, and decoder step."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from jetdraft.bundle import Vision
from jetdraft.checkpoints import attention
from jetdraft.checkpoints.attention import KeysAndValues, SourceState, StepState
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import HIDDEN, TensorSpec
from jetdraft.export.step import Specs, Step, dtype_of, make_state, zeros
from jetdraft.runtime.passes.pictures import encoder_inputs

_TRACED_SQUARES = 7  # Squares of patches, each a row, that the tracer sees.
_TRACED_SOURCE = 9  # Tokens of the source that the tracer sees.


def cross_attentions(model: Any) -> list[Any]:
    """The decoder's modules that attend to the source, by layer."""
    return [
        module
        for module in model.get_decoder().modules()
        if getattr(module, "is_causal", None) is False
        and getattr(module, "is_decoder", False)
    ]


def source_sizes(model: Any) -> tuple[int, int]:
    """Return the mel bins of a speech model, and its slots; zeros for other models."""
    bins = int(getattr(model.config, "num_mel_bins", 0))
    table = getattr(model.get_encoder(), "embed_positions", None)
    return bins, table.weight.shape[0] if bins and table is not None else 0


def kv_layers(module: Any) -> tuple[Any, Any]:
    """The linear layers that make a cross attention's keys and values."""
    if hasattr(module, "k_proj"):
        return module.k_proj, module.v_proj
    return module.k, module.v


def encoder_parameters(model: Any) -> set[int]:
    """The ids of the weights that only the encoder's graph reads."""
    layers = [layer for m in cross_attentions(model) for layer in kv_layers(m)]
    parts = [model.get_encoder(), *layers]
    own = {id(weight) for part in parts for weight in part.parameters()}
    return own - {id(weight) for weight in model.get_input_embeddings().parameters()}


class SourceStep(Step):
    """One pass of a decoder that reads a source, as its contract declares it."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield, unlike the parent, only the weights that the decoder's graph reads."""
        hidden = encoder_parameters(self.model)
        for name, weight in super().named_parameters(*args, **kwargs):
            if id(weight) not in hidden:
                yield name, weight

    def forward(self, *inputs: Any) -> list[Tensor]:
        input_ids, position_ids, cursor, total_length, answer_rows, *others = inputs
        source_length, *cross, past = others
        plain = make_state(position_ids, cursor, total_length, past)
        bias = self.slot_distance_bias(position_ids, position_ids, cursor)
        state = self.source_state(plain, source_length, bias)
        self._cross: KeysAndValues = list(zip(cross[::2], cross[1::2], strict=True))
        return self.outputs(state, input_ids, position_ids, answer_rows)

    def logits(
        self, state: Any, input_ids: Tensor, position_ids: Tensor, answer_rows: Tensor
    ) -> Tensor:
        answered = attention.answering_rows(self.model, (slice(None), answer_rows))
        inputs = self.model_inputs(self._cross)
        with attention.at_positions(self.model, position_ids), answered:
            logits: Tensor = self.model(decoder_input_ids=input_ids, **inputs).logits
        return logits.float()

    def model_inputs(self, cross: KeysAndValues) -> dict[str, Any]:
        """Return model arguments that pass cross buffers in place of a source."""
        # Never read, since the cross buffers are written already.
        width = self.model.get_input_embeddings().weight.shape[1]
        states = torch.zeros(1, 1, width, dtype=dtype_of(self.contract))
        return {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            "past_key_values": attention.CrossCache(cross),
            "use_cache": True,
        }

    def source_state(
        self, plain: StepState, source_length: Tensor, bias: Tensor | None
    ) -> SourceState:
        """Return `plain` with `bias`, and with a bias that hides empty source slots."""
        slots = torch.arange(self.contract.source_slots)
        beyond = (slots >= source_length).to(dtype_of(self.contract)) * HIDDEN
        own = plain.cursor, plain.last_row, plain.total_length, plain.past
        return SourceState(*own, bias=bias, source_bias=beyond[None, None, None])

    def slot_distance_bias(
        self, rows: Tensor, positions: Tensor, cursor: Tensor, both_ways: bool = False
    ) -> Tensor | None:
        """Return the bias [1, heads, n, slots] by distance, if the model has such."""
        if attention.relative_bias_module(self.model) is None:
            return None
        slots = torch.arange(self.contract.slots)
        place = (slots - cursor).clamp(min=0)
        # A comparison with the number of rows, as a clip to it, would fix that number.
        place = torch.minimum(place, torch.ones_like(positions).sum() - 1)
        own = positions[0].gather(0, place)
        taken = torch.where(slots < cursor, slots, own)
        return attention.distance_bias(self.model, rows, taken[None], both_ways)


class EncoderStep(Step):
    """The encoder's pass: it makes the cross keys and values of all decoder layers."""

    @property
    def declared_tensors(self) -> tuple[Specs, Specs, Specs]:
        """The inputs (a source), no past buffers, and the outputs (cross buffers)."""
        return (self.contract.encoder_input,), (), self.contract.cross_inputs

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield, unlike the parent, only the weights that the encoder's graph reads."""
        own = encoder_parameters(self.model)
        own |= {id(w) for w in self.model.get_encoder().parameters()}
        for name, weight in super().named_parameters(*args, **kwargs):
            if id(weight) in own:
                yield name, weight

    def example_inputs(self) -> list[Tensor]:
        if self.contract.source_bins:
            return [zeros(self.contract.encoder_input)]
        return [torch.zeros(1, _TRACED_SOURCE, dtype=torch.long)]

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Return the cross buffers of a source, in the contract's order."""
        source, fills = inputs[0], self.contract.source_bins > 0
        if fills:
            source = source.to(dtype_of(self.contract))
        states = self.model.get_encoder()(source).last_hidden_state
        sides = [side for m in cross_attentions(self.model) for side in kv_layers(m)]
        pairs = zip(sides, self.contract.cross_inputs, strict=True)
        return [_as_buffer(side(states), spec.shape, fills) for side, spec in pairs]


class VisionStep(Step):
    """The pass of the encoder of pictures: the rows of a tile, or of patches.

    `encode` makes rows [..., width] of the model and what `encoder_inputs` gives.
    """

    def __init__(
        self,
        model: Any,
        contract: StepContract,
        vision: Vision,
        encode: Callable[..., Tensor],
    ) -> None:
        super().__init__(model, contract)
        self._encode = encode
        self._is_flexible = vision.patch > 0
        squares = _TRACED_SQUARES if self._is_flexible else 1
        pixels = np.zeros((vision.side * squares, vision.side, 3), np.uint8)
        self._example = encoder_inputs(pixels, vision)

    @property
    def declared_tensors(self) -> tuple[Specs, Specs, Specs]:
        inputs = []
        for name, array in self._example.items():
            first = "squares" if self._is_flexible else array.shape[0]
            shape = (first, *array.shape[1:])
            inputs.append(TensorSpec(name, str(array.dtype), shape))
        rows = TensorSpec("rows", "float32", (1, "rows", self.contract.picture_size))
        return tuple(inputs), (), (rows,)

    def example_inputs(self) -> list[Tensor]:
        return [torch.from_numpy(array) for array in self._example.values()]

    def forward(self, *inputs: Any) -> list[Tensor]:
        """Return the rows of a picture or a tile, float32 [1, rows, width]."""
        rows = self._encode(self.model, *inputs[: len(self._example)]).float()
        return [rows.reshape(1, -1, rows.shape[-1])]


def _as_buffer(rows: Tensor, shape: tuple[Any, ...], fills: bool) -> Tensor:
    """Reshape rows [1, source, heads * d], which fill a buffer or get zeros behind."""
    _, heads, slots, size = shape
    split = rows.view(1, slots if fills else -1, heads, size).transpose(1, 2)
    if fills:
        return split
    # Computed, since zeros alone would be a constant as large as the buffer.
    empty = (split[:, :, :1] * 0).expand(1, heads, slots, size)
    return torch.cat([split, empty], 2)[:, :, :slots]
