"""Muon on machines without fast bfloat16."""

from __future__ import annotations

import pytest
import torch

from jetdraft.train import machine
from jetdraft.train.machine import Muon

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
    monkeypatch.setattr(machine, "is_fast", lambda device: fast)
    torch.manual_seed(3)
    matrix = torch.nn.Parameter(torch.zeros(16, 24))
    gradient = matrix.grad = torch.randn(16, 24)
    before = gradient.clone()
    optimizer = Muon([matrix], lr=1.0, weight_decay=0.0, momentum=0.0)
    optimizer.step()
    scale = 0.2 * 24**0.5  # as torch's match_rms_adamw
    gap = (matrix.detach() / scale + orthogonal(before)).abs().max().item()
    assert (gap > 1e-4) == fast
    assert torch.equal(gradient, before)
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], before)


def test_only_its_own_products_are_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a closure computes, and what another thread does, stays bfloat16."""
    monkeypatch.setattr(machine, "is_fast", lambda device: False)
    matrix, dtypes = torch.nn.Parameter(torch.zeros(4, 6)), []

    def closure() -> torch.Tensor:
        matrix.grad = torch.ones(4, 6)
        dtypes.append(torch.ones(1).bfloat16().dtype)
        return torch.zeros(())

    Muon([matrix], lr=0.1).step(closure)
    assert dtypes == [torch.bfloat16]


@pytest.mark.parametrize("shape", [(16, 24), (24, 16)])
def test_steps_are_those_of_torch_where_bfloat16_is_fast(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(machine, "is_fast", lambda device: True)
    torch.manual_seed(5)
    one, other = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    ours = Muon([one], lr=0.02)
    theirs = torch.optim.Muon([other], lr=0.02, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        one.grad = torch.randn(shape)
        other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    assert torch.equal(one, other)
