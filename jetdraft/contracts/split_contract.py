"""The contracts of a graph in two halves, and of an encoder's graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetdraft.contracts.constants import FRAMES_PER_SLOT
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import ROWS, TensorSpec
from jetdraft.errors import ContractError

EARLY_EXIT = ("streams.narrow.weight", "streams.widen.weight")
"""The weights of the pruning adapter, which only the lower half of a graph has."""

PARENTS = TensorSpec("parents", "int64", (ROWS,))
"""The parents of a draft's rows, for an early exit; the root is its own parent."""

SCORES = TensorSpec("scores", "float32", (1, ROWS))
"""What an early exit gives: the log probability of each row's token."""


@dataclass(frozen=True)
class SplitContract:
    """Two graphs that together do what a whole graph does.

    The lower half runs the rows of a draft and gives the hidden states that enter the
    upper half. With `scores` it has an early exit, which also gives the log probability
    of each row's token after its parent. The upper half takes the hidden states of the
    rows that the host keeps. An exit graph can take its place, see `exit_inputs`.
    `lower` and `upper` are the contracts of the two halves' KV buffers; in both, layers
    are numbered from 0.
    """

    whole: StepContract
    hidden_size: int
    lower: StepContract
    upper: StepContract
    scores: bool = False

    @classmethod
    def of(
        cls, whole: StepContract, layers: int, hidden_size: int, scores: bool = False
    ) -> SplitContract:
        """The contract of two halves; the upper half has the top `layers`.

        `hidden_size` is the width of the states between them, which take the place of
        features. Raises `ContractError` if a half would have no layer.
        """
        below = len(whole.kv_shapes) - layers
        if layers < 1 or below < 1:
            raise ContractError(
                f"graph contract: {len(whole.kv_shapes)} layers cannot be cut below "
                f"the top {layers}; export the bundle again"
            )
        lower, upper = whole.kv_shapes[:below], whole.kv_shapes[below:]
        return cls(
            whole=whole,
            hidden_size=hidden_size,
            lower=replace(whole, kv_shapes=lower, feature_size=0),
            upper=replace(whole, kv_shapes=upper, feature_size=0),
            scores=scores,
        )

    @property
    def hidden(self) -> TensorSpec:
        """The hidden states between the halves."""
        return TensorSpec("hidden", self.whole.dtype, (1, ROWS, self.hidden_size))

    @property
    def lower_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the lower half, in graph order."""
        rows_only = replace(self.lower, streams=0)
        return (
            *self.whole.inputs[:4],
            *(rows_only.mask if self.whole.masked else ()),
            *([PARENTS] if self.scores else []),
            *self.lower.buffers("past"),
        )

    @property
    def lower_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the lower half, in graph order."""
        scores = [SCORES] if self.scores else []
        return (self.hidden, *scores, *self.lower.buffers("present"))

    @property
    def upper_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the upper half, in graph order."""
        return (self.hidden, *self.upper.inputs[1:])

    @property
    def upper_outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs of the upper half, in graph order."""
        return self.upper.outputs

    @property
    def exit_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the graph that leaves the upper layers out, in graph order.

        It has the outputs of the upper half. `hidden` becomes the keys and values of
        the layers left out, and the LM head reads `exit_hidden`.
        """
        exit_hidden = replace(self.hidden, name="exit_hidden")
        buffers = self.upper.buffers("past")
        return (self.hidden, *self.whole.inputs[1:5], exit_hidden, *buffers)


SOURCE = "source"
"""The name of the axis of a source's tokens."""


@dataclass(frozen=True)
class SourceContract:
    """The graph of an encoder, for the decoder with the contract `step`.

    It takes a source, `input_ids` int64 [1, source], and gives the cross buffers of all
    layers, with zeros behind the source. An encoder that hears takes `input_features`
    float32 [1, bins, frames], a sound that fills all slots.
    """

    step: StepContract

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs, in graph order."""
        if self.step.source_bins:
            shape = 1, self.step.source_bins, self.frames
            return (TensorSpec("input_features", "float32", shape),)
        return (TensorSpec("input_ids", "int64", (1, SOURCE)),)

    @property
    def frames(self) -> int:
        """The frames of the spectrum of a sound."""
        return FRAMES_PER_SLOT * self.step.source_slots

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """All outputs, in graph order."""
        return self.step.cross
