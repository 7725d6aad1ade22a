"""What a new drafter takes from its target to begin with."""

from __future__ import annotations

import torch
from torch import nn


def take_weights(module: nn.Module, other: nn.Module) -> None:
    """Copy the weights that another module has under the same names and shapes."""
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name in theirs and theirs[name].shape == weight.shape:
                weight.copy_(theirs[name])


def take_norm(norm: nn.Module, other: nn.Module, width: int) -> None:
    """Copy the weights of a norm over `width` numbers, if it is of the same kind.

    Some kinds add one to their weights.
    """
    before = {name: weight.clone() for name, weight in norm.state_dict().items()}
    take_weights(norm, other)
    probe = torch.randn(1, width)
    # A target that has written texts is on a GPU; the drafter is not yet.
    device = next((weight.device for weight in other.parameters()), probe.device)
    with torch.no_grad():
        theirs = other(probe.to(device)).cpu()
        if not torch.allclose(norm(probe), theirs, atol=1e-4):
            norm.load_state_dict(before)
