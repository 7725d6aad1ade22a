import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from jetdraft.checkpoints.checkpoint import read_settings
from jetdraft.checkpoints.streams import UNFINISHED
from jetdraft.errors import CheckpointError, OptionError, OutputError
from jetdraft.train import machine, run_folder, task, teacher, training
from jetdraft.train.machine import Muon, defer_interrupts, precision
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.teacher import TensorCache
from tests.tiny import llama_config, save_checkpoint

COEFFICIENTS = (3.4445, -4.775, 2.0315)


def test_a_kill_before_the_last_step_leaves_a_finished_training(tmp_path, monkeypatch):
    """It must not ask for a state that it has deleted itself."""
    folder = RunFolder(tmp_path / "out")
    folder.create()
    unlink, calls = Path.unlink, []

    def killed(file, missing_ok=False):
        if file.name in ("training.pt", UNFINISHED):
            calls.append(file.name)
            if len(calls) == 2:
                raise SystemExit
        unlink(file, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(SystemExit):
        folder.save({"w": torch.ones(1)}, {}, {"run": {}}, finished=True)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="holds a finished training"):
        RunFolder(tmp_path / "out")


def test_the_owner_of_a_cache_is_whole_whenever_others_look(tmp_path, monkeypatch):
    opened = Path.open

    def open_(file, mode="r", *args, **more):
        assert file.name != "owner.txt" or mode == "r", "it would be empty for a moment"
        return opened(file, mode, *args, **more)

    monkeypatch.setattr(Path, "open", open_)
    for process in range(2):
        TensorCache(tmp_path, "owner", process)
    with pytest.raises(OutputError, match="another folder"):
        TensorCache(tmp_path, "other")


def test_a_copy_of_the_target_does_not_pass_for_the_result(tmp_path):
    """Before the first save it is the target without what was to be added."""
    target = save_checkpoint(tmp_path / "target", llama_config())
    RunFolder(tmp_path / "out", learned="prompt tokens").add_target(Path(target), "any")
    with pytest.raises(CheckpointError, match="saved no prompt tokens yet"):
        read_settings(tmp_path / "out")


def test_the_weights_of_the_target_are_not_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LINKED_BYTES", 10_000)
    target = save_checkpoint(tmp_path / "target", llama_config())
    names = {True: "model.safetensors", False: "config.json"}
    RunFolder(tmp_path / "out").add_target(target, "any")
    for is_linked, name in names.items():
        one, other = target / name, tmp_path / "out" / name
        assert one.samefile(other) == is_linked
        assert one.read_bytes() == other.read_bytes()
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError))
    RunFolder(tmp_path / "copied").add_target(target, "any")
    copy = tmp_path / "copied" / names[True]
    assert not copy.samefile(target / names[True])
    assert copy.read_bytes() == (target / names[True]).read_bytes()


def test_a_shard_is_not_written_over_another(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher, "SHARD_TENSORS", 2)
    cache = TensorCache(tmp_path, "owner")
    for number in range(6):
        cache.write(f"k{number}", torch.full((3, 4), float(number)))
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()  # damaged, and deleted as the message says
    cache = TensorCache(tmp_path, "owner")
    for number in range(6, 8):
        cache.write(f"k{number}", torch.full((3, 4), float(number)))
    for number in range(2, 8):
        assert cache.read(f"k{number}")[0, 0] == number


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
    with task.Run().accelerator.autocast():
        assert (rows @ rows).dtype == wanted


def test_ctrl_c_waits_for_the_end_of_a_step():
    steps, before = [], signal.getsignal(signal.SIGINT)

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
    training.check_batch_size(2, processes=2)
    with pytest.raises(OptionError, match="--batch-size 3 or more"):
        training.check_batch_size(2, processes=3)
