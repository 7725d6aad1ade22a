"""The pass that leaves the upper layers of a target out (SEC, 2401.09964).

Rows after an exit attend to all rows before them in every layer. So the layers that a
row skips still get its keys and values, computed from the state that left the lower
layers: the paper's state copying.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jetdraft.checkpoints.attention import attending
from jetdraft.checkpoints.streamed import decoder_layers, final_norm
from jetdraft.contracts.split_contract import SplitContract
from jetdraft.export.step import Specs, Step, presents, state_of, zeros


class ExitStep(Step):
    """One pass in place of the upper half, as `SplitContract.exit_inputs` declares it.

    Only the norm and the projections to keys and values of an upper layer are computed:
    the tracer drops the rest, which no output reads.

        trace(ExitStep(model, split), checkpoint.names())
    """

    def __init__(self, model: Any, split: SplitContract) -> None:
        super().__init__(model, replace(split.upper, tree=False))
        self.split = split

    @property
    def declared(self) -> tuple[Specs, Specs, Specs]:
        """The inputs of an exit, the buffers among them, and its outputs."""
        upper = self.split.upper
        return self.split.exit_inputs, upper.buffers("past"), upper.outputs

    def forward(  # type: ignore[override]  # it has other inputs than a whole pass
        self,
        hidden: Tensor,
        position_ids: Tensor,
        cursor: Tensor,
        total_length: Tensor,
        answer_rows: Tensor,
        exit_hidden: Tensor,
        past: list[Tensor],
    ) -> list[Tensor]:
        """The outputs of the upper half, in the order of the contract."""
        unused = [zeros(spec) for spec in self.split.lower.buffers("past")]
        state = state_of(position_ids, cursor, total_length, [*unused, *past])
        ids = torch.zeros_like(position_ids)
        with attending(state), self._entering(hidden, exit_hidden):
            logits = self.logits(state, ids, position_ids, answer_rows)
        return [*self.answers(logits), *presents(state)[len(unused) :]]

    @contextlib.contextmanager
    def _entering(self, hidden: Tensor, exit_hidden: Tensor) -> Iterator[None]:
        """Let `hidden` enter each upper layer, and `exit_hidden` the final norm."""
        layers = decoder_layers(self.model)
        upper = layers[len(self.split.lower.kv_shapes) :]
        with contextlib.ExitStack() as hooks:
            for layer in upper:
                hooks.callback(_feed(layer, hidden).remove)
            hooks.callback(_feed(final_norm(self.model), exit_hidden).remove)
            yield


def _feed(module: nn.Module, states: Tensor) -> Any:
    """Let `states` enter a module in place of its own; gives the handle of the hook."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states}

    return module.register_forward_pre_hook(hook, with_kwargs=True)
