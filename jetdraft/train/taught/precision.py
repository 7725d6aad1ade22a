"""The type in which matrices are multiplied."""

from __future__ import annotations

from typing import Any

import torch


def is_fast(device: torch.device) -> bool:
    """Whether bfloat16 is fast; on other CPUs it is a hundred times slower."""
    return device.type != "cpu" or torch.cpu.get_capabilities().get(
        "avx512_bf16", False
    )


def precision(device: torch.device) -> Any:
    """bfloat16 where it is fast; else float32, whatever surrounds the block."""
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast(device))
