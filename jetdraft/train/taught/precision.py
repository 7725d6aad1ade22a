"""The type in which matrices are multiplied."""

from __future__ import annotations

from typing import Any

import torch


def precision(device: torch.device) -> Any:
    """bfloat16 where it is fast; else float32, whatever surrounds the block."""
    fast = device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16")
    return torch.autocast(device.type, torch.bfloat16, enabled=bool(fast))
