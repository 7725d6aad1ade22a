"""The contract of a graph in two halves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetdraft.contracts.step_contract import StepContract
from jetdraft.contracts.tensors import ROWS, TensorSpec
from jetdraft.errors import ContractError

EARLY_EXIT = ("streams.narrow.weight", "streams.widen.weight")
"""The weights of the pruning adapter, which only the lower half of a graph has."""

PARENTS = TensorSpec("parents", "int64", (ROWS,))
"""The input with the parent of each row, for an early exit; the root has itself."""

SCORES = TensorSpec("scores", "float32", (1, ROWS))
"""The output of an early exit: the log probability of each row's token."""


@dataclass(frozen=True)
class SplitContract:
    """The contracts of the two halves that a whole graph is split into.

    The lower half outputs the hidden states that the upper half reads, and with
    `scores` the log probability of each row's token. Both number layers from 0.
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
        """Split a contract below its top `layers`; raises `ContractError`."""
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
        """The hidden states that the lower half outputs and the upper half reads."""
        return TensorSpec("hidden", self.whole.dtype, (1, ROWS, self.hidden_size))

    @property
    def lower_inputs(self) -> tuple[TensorSpec, ...]:
        """All inputs of the lower half, in graph order."""
        rows_only = replace(self.lower, streams=0)
        return (
            *self.whole.inputs[:4],
            *(rows_only.mask_inputs if self.whole.has_mask else ()),
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
    def exit_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs of the exit graph, which runs in place of the upper half.

        Its layers make keys and values of `hidden`; its LM head reads `exit_hidden`.
        """
        exit_hidden = replace(self.hidden, name="exit_hidden")
        buffers = self.upper.buffers("past")
        return (self.hidden, *self.whole.inputs[1:5], exit_hidden, *buffers)
