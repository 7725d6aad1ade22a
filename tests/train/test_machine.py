"""The machine that trains: what it is fast with, its processes, and Ctrl-C."""

import os
import signal

import pytest
import torch

from jetdraft.errors import OptionError
from jetdraft.train import machine
from jetdraft.train.machine import Muon, defer_interrupts, precision
from jetdraft.train.task import Run
from jetdraft.train.training import check_batch_size

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
    monkeypatch.setattr(machine, "has_fast_halves", lambda device: fast)
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
    monkeypatch.setattr(machine, "has_fast_halves", lambda device: False)
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
    monkeypatch.setattr(machine, "has_fast_halves", lambda device: True)
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


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpu_multiplies_in_bfloat16_where_that_is_fast(fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": fast})
    wanted, rows = torch.bfloat16 if fast else torch.float32, torch.ones(2, 2)
    with precision(torch.device("cpu")):
        assert (rows @ rows).dtype == wanted
    with Run().accelerator.autocast():
        assert (rows @ rows).dtype == wanted


def test_ctrl_c_waits_for_the_end_of_a_step():
    steps = []
    before = signal.getsignal(signal.SIGINT)

    def step():
        with defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append(1)

    with pytest.raises(KeyboardInterrupt):
        step()
    assert steps == [1]
    assert signal.getsignal(signal.SIGINT) is before
    with defer_interrupts():
        steps.append(2)
    with pytest.raises(ZeroDivisionError), defer_interrupts():
        steps.append(1 / 0)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_batch_has_a_part_for_each_process():
    check_batch_size(2, processes=2)
    with pytest.raises(OptionError, match="--batch-size 3 or more"):
        check_batch_size(2, processes=3)
