"""Muon in the floats that the machine multiplies fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from jetdraft.train.taught.precision import is_fast


class _InFloat32(TorchFunctionMode):
    """Within it `Tensor.bfloat16()` gives a copy in float32."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return function(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz steps are bfloat16 only where that is fast.

    On other processors these few products take longer than the rest of a step.

        Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw").step()
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; see `torch.optim.Optimizer`."""
        device = self.param_groups[0]["params"][0].device
        with nullcontext() if is_fast(device) else _InFloat32():
            return super().step(closure)  # type: ignore[no-untyped-call]
