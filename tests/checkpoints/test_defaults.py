"""The sampling defaults and end-of-text ids of a checkpoint."""

import json

import pytest
import torch

from jetdraft.checkpoints.checkpoint import Checkpoint
from jetdraft.checkpoints.defaults import FILE, GenerationFields
from jetdraft.errors import CheckpointError
from tests.tiny import drafter_config, save_checkpoint

LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
QWEN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
SAMPLED, SAMPLES = {"do_sample": True}, {"temperature": 1.0, "top_k": 50}


def written(folder, fields):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").touch()
    (folder / FILE).write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "defaults"),
    [
        ({}, {}),
        (LLAMA, {"temperature": 0.6, "top_p": 0.9, "top_k": 50}),
        ({**SAMPLED, **QWEN}, QWEN),
        (SAMPLED, SAMPLES),
        ({**SAMPLED, "top_k": None, "top_p": 1}, {**SAMPLES, "top_p": 1}),
        (
            {**SAMPLED, "top_k": 0, "min_p": 0.15},
            {**SAMPLES, "top_k": 0, "min_p": 0.15},
        ),
        ({"min_p": 0.15}, {}),
        ({"stop_strings": "\n\n"}, {"stop": ["\n\n"]}),
        ({"stop_strings": ["a", "", "b"]}, {"stop": ["a", "b"]}),
        ({**LLAMA, "do_sample": False}, {}),
        ({"temperature": 0.6, "top_k": "never read"}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.0}, {}),
    ],
)
def test_defaults_are_those_that_would_be_used(tmp_path, fields, defaults):
    source = written(tmp_path / "checkpoint", fields)
    assert GenerationFields.read(source).defaults() == defaults


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert GenerationFields.read(str(tmp_path)).defaults() == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", -1),
        ("min_p", 1.0),
        ("repetition_penalty", 0),
        ("repetition_penalty", [1.1]),
    ],
)
def test_a_value_out_of_range_is_refused(tmp_path, name, value):
    source = written(tmp_path / "checkpoint", {"do_sample": True, name: value})
    with pytest.raises(
        CheckpointError, match=f"has {name} .*; correct or remove it|NaN is not"
    ):
        GenerationFields.read(source)


@pytest.mark.parametrize("text", ["", "not json", "[1]", "5", "\x00"])
def test_a_damaged_file_is_refused(tmp_path, text):
    written(tmp_path / "checkpoint", {})
    (tmp_path / "checkpoint" / FILE).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GenerationFields.read(str(tmp_path / "checkpoint"))


def test_a_bad_value_is_refused_before_the_model_is_loaded(tmp_path):
    source = save_checkpoint(tmp_path / "checkpoint", drafter_config())
    (source / FILE).write_text(json.dumps({"do_sample": True, "temperature": -1}))
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has temperature -1"):
        Checkpoint.load(str(source), torch.float32)
