"""The machine that trains: its processes, the numbers it is fast with, and Ctrl-C."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from jetdraft.errors import OptionError


def this_process() -> PartialState:
    """Return accelerate's state of this process; raises `OptionError`."""
    # Without its argument, accelerate lets each process on a CPU be alone.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != started:
        fact = f"{started} processes were started, and each would train alone; on CPUs"
        raise OptionError(f"{fact}, set ACCELERATE_USE_CPU=true in the environment")
    return state


def has_fast_halves(device: torch.device) -> bool:
    """Whether a device is fast in bfloat16; a CPU without it takes 100 times longer."""
    features = torch.cpu.get_capabilities()
    return device.type != "cpu" or features.get("avx512_bf16", False)


def precision(device: torch.device) -> Any:
    """Return an autocast to bfloat16 where that is fast, else one that does nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_fast_halves(device))


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay a `KeyboardInterrupt` that comes in the block to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts its main thread only
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


class Muon(torch.optim.Muon):
    """torch's Muon (2502.16982), in float32 where torch's bfloat16 is slow.

    It always scales as "match_rms_adamw", with torch's default iterations.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move the weights by one step, in place; returns the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = orthogonalize(weight.grad.lerp(mean, momentum))
                weight.mul_(1 - rate * group["weight_decay"])
                scale = 0.2 * math.sqrt(max(weight.shape))
                weight.add_(update, alpha=-rate * scale)
        return loss


NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix, by five Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    dtype = torch.bfloat16 if has_fast_halves(matrix.device) else torch.float32
    x = matrix.to(dtype, copy=True)
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=1e-7))  # the spectral norm is at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
