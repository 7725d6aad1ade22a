"""The folder of a training, and what an end at a bad moment leaves in it."""

import os
from pathlib import Path

import pytest
import torch

from jetdraft.checkpoints.checkpoint import read_settings
from jetdraft.checkpoints.streams import UNFINISHED
from jetdraft.errors import CheckpointError, OutputError
from jetdraft.train import run_folder, teacher
from jetdraft.train.run_folder import RunFolder
from jetdraft.train.teacher import TensorCache
from tests.tiny import llama_config, save_checkpoint


def test_a_kill_between_the_last_two_steps_leaves_a_finished_training(
    tmp_path, monkeypatch
):
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
    """Two processes of a training open the folder at the same time."""
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
    folder = RunFolder(tmp_path / "out", learned="prompt tokens")
    folder.add_target(Path(target), "any")
    with pytest.raises(CheckpointError, match="saved no prompt tokens yet"):
        read_settings(tmp_path / "out")


def test_the_weights_of_the_target_are_not_written_again(tmp_path, monkeypatch):
    """They are linked, as they can have gigabytes; where links fail, copied."""
    monkeypatch.setattr(run_folder, "LINKED_BYTES", 10_000)
    target = save_checkpoint(tmp_path / "target", llama_config())
    names = {True: "model.safetensors", False: "config.json"}
    RunFolder(tmp_path / "out").add_target(target, "any")
    for is_linked, name in names.items():
        one, other = target / name, tmp_path / "out" / name
        assert one.samefile(other) == is_linked
        assert one.read_bytes() == other.read_bytes()

    def link(*names):
        raise OSError

    monkeypatch.setattr(os, "link", link)
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
