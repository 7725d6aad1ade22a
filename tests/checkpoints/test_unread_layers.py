"""A config with fewer layers than its weights is another model, and refused."""

from __future__ import annotations

import json

import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.preview.unread_layers import check_unread
from jetdraft.errors import CheckpointError
from tests.tiny import llama_config, save_checkpoint


def test_a_config_with_fewer_layers_than_its_weights(tmp_path):
    folder = save_checkpoint(tmp_path / "c", llama_config(num_hidden_layers=3))
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["num_hidden_layers"] = 2
    for name in ("layer_types",):
        fields.pop(name, None)
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"layers\.2\..*describes 2 such layers"):
        Checkpoint.load(str(folder), torch.float32)


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (["model.layers.1.w"], ["model.layers.2.eh_proj.weight", "model.layers.2.w"]),
        (["model.layers.1.w"], ["mtp.layers.0.w", "model.mtp_layers.0.w", "mtp.fc"]),
        (["h.1.w"], ["h.0.attn.bias", "lm_head.weight"]),
        (["encoder.block.3.w", "decoder.block.1.w"], ["encoder.block.3.mask"]),
    ],
)
def test_what_else_is_left_unread(read, unread):
    """MTP modules, which --head reads, and parts of layers that are read."""
    check_unread("folder", read, unread)


def test_each_stack_has_its_own_layers(tmp_path):
    """A module of MTP excuses its own layer only."""
    read = ["encoder.block.3.w", "decoder.block.1.w"]
    with pytest.raises(CheckpointError, match=r"decoder\.block\.2\.w, .* 2 such"):
        check_unread("folder", read, ["decoder.block.2.w", "encoder.block.3.mask"])
    unread = ["layers.2.eh_proj.weight", "layers.2.w", "layers.3.w"]
    with pytest.raises(CheckpointError, match=r"layers\.3\.w"):
        check_unread("folder", ["layers.1.w"], unread)
