"""States on the disk survive the loss of a shard."""

from __future__ import annotations

import torch

from jetdraft.train import teacher
from jetdraft.train.teacher import TensorCache


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
