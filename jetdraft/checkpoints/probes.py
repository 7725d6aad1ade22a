"""An unchanged decoder whose rows can carry probes, which hooks on its layers add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass
class Pass:
    """One pass: its rows, the s probes after them, and tensors for its hooks.

    `carriers` int64 [s] or [b, s] has the row, and `ids` int64 [s] the embedding, of
    each probe; `is_probe` int64 [n + s] is 1 for probes. `rotations` has pairs: of
    rows, and of rows and probes. `below` has the states that enter the layers with
    probes. A probe of several members counts as several here.
    """

    rows: int
    carriers: Tensor
    ids: Tensor
    positions: Tensor
    is_probe: Tensor
    rotations: list[tuple[Any, Any]] = field(default_factory=list)
    below: list[Tensor] = field(default_factory=list)


class ProbedModel(nn.Module, ABC):
    """A causal LM of transformers whose rows can carry probes in its `top` layers."""

    trained: ClassVar[str]
    """A part of the name of each weight that is trained."""

    settings: Any

    def __init__(self, model: Any, top: Iterable[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.on_probes_added: Callable[[], None] = lambda: None
        self._pass: Pass | None = None
        first, *others = top
        first.register_forward_pre_hook(self._append_probes, with_kwargs=True)
        for layer in (first, *others):
            layer.register_forward_pre_hook(self._position_probes, with_kwargs=True)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                module.register_forward_hook(self._rotate_probes, with_kwargs=True)

    @property
    def base(self) -> str:
        """The hash of the weights that the probes were trained for."""
        return str(self.settings.base)

    @property
    def task(self) -> dict[str, Tensor]:
        """All trained weights by their names."""
        parameters = self.named_parameters()
        return {n: weight for n, weight in parameters if self.trained in n.split(".")}

    @abstractmethod
    def start_states(self, hidden: Tensor) -> Tensor:
        """Return the probes' first states [b, s, h]; the rows' states are [b, n, h]."""

    def run_pass(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        probes: tuple[Tensor, Tensor, Tensor],
        keep: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Pass]:
        """Return logits [b, m + s, vocab] of m rows and then s probes, and the pass.

        `input_ids` and `position_ids` are int64 [b, n]. `probes` are [s] each: carriers
        (or [b, s]), embeddings, distances from the carriers. `keep` [m] are the rows.
        """
        carriers, ids, distances = probes
        rows = input_ids.shape[1]
        positions = carrier_values(position_ids, carriers) + distances
        # Computed from tensors on the device: a row count would be read on the host.
        is_probe = torch.cat([torch.zeros_like(position_ids[0]), torch.ones_like(ids)])
        all_positions = torch.cat([position_ids, positions], 1)
        current = Pass(rows, carriers, ids, all_positions, is_probe)
        places = torch.arange(rows, rows + ids.shape[0], device=keep.device)
        self._pass = current
        try:
            logits = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                logits_to_keep=torch.cat([keep, places]),
                **options,
            ).logits
        finally:
            self._pass = None
        return logits, current

    @property
    def current_pass(self) -> Pass:
        """The pass that runs; only valid inside `run_pass`."""
        assert self._pass is not None, f"run the model through {type(self).__name__}"
        return self._pass

    def _append_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before the first layer with probes: append the probes' first states."""
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self.current_pass.below.append(hidden)
        starts = self.start_states(hidden)
        self.on_probes_added()
        return (torch.cat([hidden, starts], 1), *args[1:]), kwargs

    def _position_probes(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook before a layer with probes: set positions and rotations of all rows."""
        current = self.current_pass
        kwargs = {**kwargs, "position_ids": current.positions}
        for of_rows, of_rows_and_probes in current.rotations:
            if kwargs.get("position_embeddings") is of_rows:
                kwargs["position_embeddings"] = of_rows_and_probes
        return args, kwargs

    def _rotate_probes(self, rotary: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Hook after the rotary embedding: keep its rotations and those with probes."""
        current = self.current_pass
        args, kwargs = list(args), dict(kwargs)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = current.positions
        else:
            args[1] = current.positions
        # Unlike a call, `forward` does not run this hook again.
        current.rotations.append((output, rotary.forward(*args, **kwargs)))


def carrier_values(rows: Tensor, carriers: Tensor) -> Tensor:
    """Return rows' values [b, n, ...] at the `carriers` [s] or [b, s]: [b, s, ...]."""
    if carriers.ndim == 1:
        # Indexing of integers would run on the host with WebGPU.
        return rows.index_select(1, carriers)
    return rows[torch.arange(len(rows), device=rows.device)[:, None], carriers]
