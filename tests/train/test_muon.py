"""Muon on machines without fast bfloat16."""

from __future__ import annotations

import pytest
import torch

from jetdraft.train.taught import muon
from jetdraft.train.taught.muon import Muon

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps in float64."""
    x = gradient.double()
    x = x / x.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("fast", [False, True])
def test_steps_are_bfloat16_only_where_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(muon, "is_fast", lambda device: fast)
    torch.manual_seed(3)
    matrix = torch.nn.Parameter(torch.zeros(16, 24))
    gradient = matrix.grad = torch.randn(16, 24)
    before = gradient.clone()
    optimizer = Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0)
    optimizer.step()
    gap = (matrix.detach() + orthogonal(before)).abs().max().item()
    assert (gap > 1e-4) == fast
    assert torch.equal(gradient, before)
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], before)
