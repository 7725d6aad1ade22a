"""The contract of an encoder's graph."""

from __future__ import annotations

from dataclasses import dataclass

from jetdraft.contracts.constants import FRAMES_PER_SLOT
from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensor_spec import TensorSpec

SOURCE = "source"
"""The name of the axis of a source's tokens."""


@dataclass(frozen=True)
class SourceContract:
    """The graph of an encoder, for the decoder with the contract `step`.

    It takes a source, `input_ids` int64 [1, source], and gives the cross buffers of all
    layers, with zeros behind the source. An encoder that hears takes `input_features`
    float32 [1, bins, frames], a sound that fills all slots.

        SourceContract(contract).outputs
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
