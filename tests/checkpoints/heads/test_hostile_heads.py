"""A folder of a head may hold anything: it is refused in one line, and at once."""

from __future__ import annotations

import json
import os

import pytest
import torch

from jetdraft.checkpoints.heads.head_reader import load_head
from jetdraft.errors import CheckpointError
from tests.checkpoints.heads import layouts
from tests.checkpoints.heads.layouts import H, write


def check_refused(target, source, words="fetch|check|give|needs"):
    with pytest.raises(CheckpointError, match=words) as refused:
        load_head(str(source), target, torch.float32)
    assert str(refused.value).isprintable()


CONFIGS = {
    "norm": (layouts.eagle3, {"rms_norm_eps": [1]}),
    "norm of text": (layouts.eagle1, {"rms_norm_eps": "small"}),
    "activation": (layouts.eagle3, {"hidden_act": "no such thing"}),
    "activation of a list": (layouts.eagle3, {"hidden_act": ["silu"]}),
    "eagle_config": (layouts.eagle3, {"eagle_config": 5}),
    "taps": (layouts.eagle3, {"eagle_aux_hidden_state_layer_ids": ["2", 3, 4]}),
    "no taps": (layouts.eagle3, {"eagle_aux_hidden_state_layer_ids": 7}),
    "rotation": (layouts.eagle1, {"rope_theta": "fast"}),
    "kind of rotation": (layouts.eagle3, {"rope_scaling": {"type": "spiral"}}),
    "layer types": (layouts.eagle3, {"layer_types": 5}),
    "memory": (layouts.eagle3, {"intermediate_size": 2**50}),
    "nested": (layouts.speculators, {"transformer_layer_config": 5}),
    "architectures": (layouts.eagle3, {"architectures": 5}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_of_odd_values(target, tmp_path, case):
    make, changes = CONFIGS[case]
    config, tensors = make()
    check_refused(target, write(tmp_path, config | changes, tensors))


TENSORS = {
    "layers without a number": (layouts.eagle3, "model.layers.x.y", torch.zeros(2)),
    "digits without end": (layouts.eagle3, f"layers.{'9' * 5000}.y", torch.zeros(2)),
    "a number": (layouts.eagle3, "midlayer.self_attn.q_proj.weight", torch.tensor(1)),
    "fc": (layouts.eagle3, "fc.weight", torch.tensor(1.0)),
    "a billion blocks": (layouts.medusa, "0.999999999.linear.weight", torch.zeros(H)),
    "as many of Hydra": (
        layouts.hydra,
        "hydra_mlp.0.999999999.linear.weight",
        torch.zeros(H),
    ),
    "a map": (layouts.eagle3, "d2t", torch.tensor(1)),
    "another map": (layouts.eagle3, "t2d", torch.tensor(True)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_odd_tensors(target, tmp_path, case):
    make, name, tensor = TENSORS[case]
    config, tensors = make()
    check_refused(target, write(tmp_path, config, {**tensors, name: tensor}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": 1e999}', '{"a": "\\ud800"}'])
def test_a_config_beyond_the_limits(target, tmp_path, text):
    write(tmp_path, *layouts.eagle3())
    (tmp_path / "config.json").write_text(text)
    check_refused(target, tmp_path, "no readable config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipes_are_not_waited_for(target, tmp_path, name):
    write(tmp_path, *layouts.eagle3())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    check_refused(target, tmp_path, "is a pipe or a device")


def test_names_cannot_steer_the_terminal(target, tmp_path):
    config, tensors = layouts.eagle3()
    check_refused(target, write(tmp_path / "a", {**config, "\x1b[2J": 1}, tensors))
    odd = {**tensors, "\x1b[2J": torch.zeros(2)}
    check_refused(target, write(tmp_path / "b", config, odd))
    value = json.loads('"\\u202e"')
    check_refused(
        target, write(tmp_path / "c", {**config, "residual_scale": value}, tensors)
    )


def test_a_name_of_medusa_cannot_either(target, tmp_path):
    config, tensors = layouts.medusa()
    odd = {**tensors, "\x1b[2J": torch.zeros(2)}
    check_refused(target, write(tmp_path, config, odd), "where Medusa has heads")
